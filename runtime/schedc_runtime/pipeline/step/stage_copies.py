"""Compares the parameters of stages that several ranks hold: both copies of `dualpipe`, and replicas.

Every so many steps, and where a state was loaded, checksums of all such parameters are added up by group of ranks.
Names travel only where two groups differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from schedc_runtime.data_parallel.gradient_sums import is_dense_shard, is_expert
from schedc_runtime.errors import RanksDisagree
from schedc_runtime.pipeline.agree.contents import HostNumbers, checksum
from schedc_runtime.pipeline.agree.step_facts import odd_ranks
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.attendance import Alike
from schedc_runtime.ranks.control import ControlPlane, Unlike
from schedc_runtime.ranks.mesh import Coordinate


class _Copy(NamedTuple):
    """A parameter here. members: processes that hold an equal one."""

    place: Coordinate
    members: tuple[int, ...]
    name: str
    parameter: nn.Parameter


class _Looked(NamedTuple):
    """Copies and their checksums, as of a step."""

    copies: list[_Copy]
    numbers: HostNumbers


class StageCopies:
    """The copies in this process. every: number of training steps from one comparison to the next; 0: none."""

    def __init__(self, assembly: Assembly, control: ControlPlane, every: int) -> None:
        self._assembly, self._control = assembly, control
        self._every = every if assembly.mesh.replicas > 1 or len(assembly.program.placement.rank_of_stage) > 1 else 0
        self._loads = -1
        self._looked: _Looked | None = None

    def loaded(self, training: bool) -> bool:
        """Whether a training step begins, and a state may have been loaded here since the last one."""
        return bool(training and self._every and self._loads != self._assembly.weights.loads)

    def begin(self, steps: int, loaded: bool) -> None:
        """A training step begins. A collective at some steps. Raises `RanksDisagree` on every rank alike.

        steps: training steps before. loaded: whether a state may have been loaded on any rank. On a GPU the checksums
        of a step are compared when the next one begins; where a state was loaded the device is waited for.
        """
        before, self._looked = self._looked, None
        self._loads = self._assembly.weights.loads
        if self._every and (loaded or steps % self._every == 0):
            copies = list(self._copies())
            self._looked = _Looked(copies, HostNumbers(checksum(copy.parameter, steps) for copy in copies))
        if before is not None:
            self._compare(before)
        if self._looked is not None and (loaded or self._assembly.device.type == "cpu"):
            looked, self._looked = self._looked, None
            self._compare(looked)

    def _compare(self, looked: _Looked) -> None:
        mesh = self._assembly.mesh
        by_members: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        told: dict[str, dict[str, int]] = {}
        for copy, number in zip(looked.copies, looked.numbers.read(), strict=True):
            by_members.setdefault(copy.members, []).append((copy.name, number))
            told.setdefault(mesh.name(copy.place), {})[f"{copy.members[0]} {copy.name}"] = number
        if self._control.alone:
            _check([told])
            return
        alike = [Alike(numbers, members) for members, numbers in by_members.items()]
        try:
            self._control.fold("comparing copies", None, lambda sent: None, alike=alike, details=lambda: told)
        except Unlike as unlike:
            _check(unlike.details)

    def _copies(self) -> Iterator[_Copy]:
        """The parameters of the stages here that other ranks hold, too."""
        mesh, placement = self._assembly.mesh, self._assembly.program.placement
        for place in self._assembly.places:
            for index, stage in sorted(self._assembly.stages[place].items()):
                holders = sorted(set(placement.rank_of_stage[:, index].tolist()))
                for name, parameter in stage.module.named_parameters():
                    replicas = _replicas(parameter, place.replica, mesh.replicas, mesh.experts)
                    members = [mesh.process(Coordinate(rank, replica)) for rank in holders for replica in replicas]
                    if len(members) > 1:
                        yield _Copy(place, tuple(sorted(members)), name, parameter)


def _replicas(parameter: nn.Parameter, replica: int, replicas: int, experts: int) -> Sequence[int]:
    """The replicas that hold equal values of a parameter of ``replica``. experts: ranks of an expert group."""
    if isinstance(parameter, DTensor) or is_dense_shard(parameter):
        return [replica]
    return range(replica % experts, replicas, experts) if is_expert(parameter) else range(replicas)


def _check(everyone: Sequence[Mapping[str, Mapping[str, int]]]) -> None:
    """Raise `RanksDisagree` where copies differ. everyone: [processes] by rank, checksums by group and name."""
    numbers: dict[str, dict[str, int]] = {}
    for process in everyone:
        for rank, by_name in process.items():
            for name, number in by_name.items():
                numbers.setdefault(name, {})[rank] = number
    different = [name for name, by_rank in numbers.items() if len(set(by_rank.values())) > 1]
    if different:
        odd, other = odd_ranks(numbers[different[0]])
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        raise RanksDisagree(
            f"the parameter `{different[0].split(' ', 1)[1]}` has other values on {odd} than on {other}{more}",
            "load the same state on all ranks that hold it, and let their optimizers have equal settings and states;"
            " Pipeline(compare_copies=0) compares no copies",
        )
