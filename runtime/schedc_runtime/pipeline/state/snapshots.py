"""Snapshots of the stages here: what `Pipeline.step` copies to the host beside its compute, and the program of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from schedc.ir.program import Program, computation
from schedc.ir.works import WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_works import insert_works, placed_in
from schedc.step.timeline import CellTimes
from schedc.step.works.place_snapshots import place_snapshots
from schedc.units import shown
from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build.assembly import Assembly

if TYPE_CHECKING:
    from schedc_runtime.offload.lanes import Lanes
    from schedc_runtime.offload.snapshot import CopiedTensor, StageSnapshot


class StateTarget(Protocol):
    """Memory of somebody else that a step copies the state to."""

    def sizes(self) -> Mapping[int, int]:
        """By stage here: bytes to copy. Ranks agree on them."""
        ...

    def begin(self) -> Mapping[int, Sequence[CopiedTensor]]:
        """By stage here: what the step copies, once all ranks have agreed on it. Nothing where there is no room."""
        ...


Wanted = bool | torch.optim.Optimizer | StateTarget
"""Whether a step takes a snapshot, the optimizer whose state it takes, too, or where the state is copied to."""


class Snapshot(NamedTuple):
    """The state of the stages here before a step, on the host.

    steps: training steps before it. model: as `Pipeline.state_dict` was. optimizer: as the optimizer's `state_dict`
    was, or None. Tensors are parts of buffers that the next snapshot writes. program: that of the step, by whose rows
    `Pipeline.trace` speaks.
    """

    steps: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    program: Program


_KEPT = 16
"""Programs with pieces that are kept."""


class _WithPieces(NamedTuple):
    """A program with pieces of the state. alone: without. shares: by rank and stage, the part of its bytes by piece."""

    alone: Program
    program: Program
    shares: dict[tuple[int, int], list[float]]


class Snapshots:
    """The snapshots of one pipeline."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.key = ""
        """Tells the program of the last agreement from others."""
        self._target: StateTarget | None = None
        self._groups: dict[str, Any] | None = None
        self._extra: dict[str, Any] = {}
        self._steps = 0
        self._programs: dict[tuple[int, str], _WithPieces] = {}
        """By identity of the program without pieces, which stays alive here, and by `key`."""
        self._last: Program | None = None
        """The program of the last snapshot."""
        self.sizes = np.zeros(0)
        """[stages] bytes of the last agreement."""

    def prepare(self, wanted: Wanted, steps: int) -> list[list[int]] | str:
        """Stage and bytes of each stage here, for all ranks to agree on; a text if this rank cannot. steps: so far."""
        try:
            self._equip()
            if not isinstance(wanted, (bool, torch.optim.Optimizer)):
                self._target = wanted
                return [[stage, count] for stage, count in wanted.sizes().items()]
            self._target = None
            self._take(wanted)
            self._steps = steps
            return [[stage.index, stage.snapshot.bytes] for stage in self.assembly.held() if stage.snapshot is not None]
        except RuntimeFault as fault:
            return f"{fault.message}; {fault.help}"

    def agree(self, everyone: Iterable[list[list[int]] | str]) -> None:
        """Take what all ranks have said. Raises `BatchRefused` on every rank alike."""
        sizes = np.zeros(self.assembly.program.stages)
        for mine in everyone:
            if isinstance(mine, str):
                raise BatchRefused(f"a snapshot cannot be taken: {mine}", "leave snapshot=... out")
            for stage, count in mine:
                sizes[stage] = max(sizes[stage], count)
        self.sizes, self.key = sizes, f"snapshots of {sizes.astype(np.int64).tolist()}"

    def begin(self, program: Program) -> Program:
        """The program with pieces of the state of every stage, all of which are ready to start.

        The other works keep their places. Raises `BatchRefused` as `agree` does.
        """
        if (key := (id(program), self.key)) not in self._programs:
            if len(self._programs) == _KEPT:
                self._programs.clear()
            self._programs[key] = self._with_pieces(program)
        prepared = self._programs[key]
        self._last = prepared.program
        given = None if self._target is None else dict(self._target.begin())
        for place in self.assembly.places:
            for stage in self.assembly.stages[place].values():
                assert stage.snapshot is not None
                own = None if given is None else given.pop(stage.index, ())
                stage.snapshot.begin(prepared.shares.get((place.pipeline, stage.index), ()), own)
        return prepared.program

    def _with_pieces(self, program: Program) -> _WithPieces:
        dependencies = Dependencies.of(computation(program)[0])
        cells = CellTimes.of(dependencies, Costs().resolved(program.stages))
        placed = place_snapshots(cells, self.sizes)
        if self._target is None:
            self._check_host(placed, placed_in(program), dependencies)
        return _WithPieces(program, insert_works(program, dependencies, placed), _shares(placed, dependencies))

    @property
    def held(self) -> list[StageSnapshot]:
        """Those of the stages here."""
        return [stage.snapshot for stage in self.assembly.held() if stage.snapshot is not None]

    def _check_host(self, pieces: PlacedWorks, others: PlacedWorks, dependencies: Dependencies) -> None:
        """Raise `BatchRefused` where snapshots and what leaves need more of a host than the plan says.

        The buffer of a snapshot is there from the begin of the stream on.
        """
        rank = pieces.rank_of(pieces.start, dependencies)
        placed = others.beside(replace(pieces, start=dependencies.rank_start[rank] + rank))
        host, most = self.assembly.plan.host, placed.on_host(dependencies)
        if host is None or not host.in_bytes or not most.size or most.max() <= host.size:
            return
        fullest = int(placed.rank_of(np.array([most.argmax()]), dependencies)[0])
        message = f"with a snapshot rank {fullest} has {shown(float(most.max()), up=True)} on the host"
        raise BatchRefused(
            f"{message}, and the plan says {shown(host.size)}", "say more in `host`, or leave snapshot=... out"
        )

    def read(self) -> Snapshot:
        """The last snapshot. Waits for its copies. Raises `StageError` where there is none."""
        model: dict[str, Any] = {}
        state: dict[int, dict[str, Any]] = {}
        for stage in self.assembly.held():
            if stage.snapshot is None:
                raise StageError(f"stage {stage.index} has no snapshot", "call step(..., snapshot=True)")
            for key, value in stage.snapshot.read().items():
                if isinstance(key, str):
                    model[key] = value
                else:
                    state.setdefault(key[0], {})[key[1]] = value
        names = [name for stage in self.assembly.held() for name in stage.module.state_dict()]
        whole = {name: model.get(name, self._extra.get(name)) for name in names}
        optimizer = None if self._groups is None else _filled(self._groups, state)
        assert self._last is not None
        return Snapshot(self._steps, whole, optimizer, self._last)

    def _equip(self) -> None:
        """Give every stage here its snapshot, on the lanes of its rank."""
        from schedc_runtime.offload.snapshot import StageSnapshot

        assembly = self.assembly
        for place in assembly.places:
            held = assembly.stages[place].values()
            missing = [stage for stage in held if stage.snapshot is None]
            if not missing:
                continue
            lanes = next((stage.offload.offload.lanes for stage in held if stage.offload is not None), None)
            if lanes is None:
                lanes = self._new_lanes(assembly.mesh.name(place))
            for stage in missing:
                stage.snapshot = StageSnapshot(stage.module, stage.index, lanes)

    def _new_lanes(self, name: str) -> Lanes:
        from schedc_runtime.offload.lanes import lanes_for

        lanes, host = lanes_for(self.assembly.device), self.assembly.plan.host
        lanes.buffers.name = name
        lanes.buffers.limit = host.size if host is not None and host.in_bytes else None
        self.assembly.lanes.append(lanes)
        return lanes

    def _take(self, wanted: Wanted) -> None:
        """Note what an optimizer has, and what of the module's states is no tensor."""
        optimizer = wanted if isinstance(wanted, torch.optim.Optimizer) else None
        self._groups = None if optimizer is None else _copied(optimizer.state_dict())
        numbers = {} if optimizer is None else _numbers(optimizer)
        seen: set[int] = set()
        for stage in self.assembly.held():
            own = {number: parameter for parameter in stage.module.parameters()
                   if (number := numbers.get(id(parameter))) is not None and number not in seen}  # fmt: skip
            seen |= own.keys()
            assert stage.snapshot is not None
            stage.snapshot.optimizer = None if optimizer is None else _state_of(optimizer, own)
            state = stage.module.state_dict(keep_vars=True)
            self._extra |= {name: copy(value) for name, value in state.items() if not isinstance(value, Tensor)}
        if left := len(numbers) - len(seen):
            raise RuntimeFault(
                f"the optimizer has {left} parameters that no stage here holds", "give it those of pipe.parameters()"
            )


def _shares(placed: PlacedWorks, dependencies: Dependencies) -> dict[tuple[int, int], list[float]]:
    """By rank and stage: the part of its bytes that each piece copies, in the order of their STARTs."""
    by_stage: dict[tuple[int, int], list[float]] = {}
    ranks, works = placed.rank_of(placed.start, dependencies), placed.works
    assert (works.kind == WorkKind.SNAPSHOT).all()
    for rank, stage, count in zip(ranks.tolist(), works.stage.tolist(), works.bytes.tolist(), strict=True):
        by_stage.setdefault((rank, stage), []).append(count)
    return {key: [count / sum(counts) for count in counts] for key, counts in by_stage.items()}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By id of a parameter: its number in the optimizer's `state_dict`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}


def _state_of(optimizer: torch.optim.Optimizer, own: Mapping[int, nn.Parameter]) -> Any:
    def state(_module: nn.Module) -> dict[tuple[int, str], Tensor]:
        return {
            (number, name): value
            for number, parameter in own.items()
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    return state


def _copied(groups: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict whose numbers stay as they are now; its tensors are the optimizer's."""
    return {**groups, "state": {number: dict(own) for number, own in groups["state"].items()}}


def _filled(groups: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict with the copies in place of its tensors."""
    return {**groups, "state": {number: {**own, **state.get(number, {})} for number, own in groups["state"].items()}}
