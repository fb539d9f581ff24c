"""The copies of tied weights in a pipeline: whether they are equal, trained alike, and counted once.

What one rank cannot see for itself travels in the message in which all ranks agree on a step. It says whether each
copy is trained and, at some steps, its bits and the hyperparameters of its group in an optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedc.ir.program import Program
from schedc.ir.ties import Tie
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.shared import SharedParameter
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.ranks.mesh import Coordinate, Mesh

Facts = dict[str, dict[str, Any]]
"""By name of a tied parameter: ``trained``, ``bits`` (empty: not compared now) and ``group`` (see `_group_of`)."""

UNKNOWN = "unknown"
"""A fact that is not compared."""

_PIECE = 1 << 22
"""Numbers of a parameter that are brought to the host at a time."""


class TiedWeights:
    """The tied parameters whose copies lie on different ranks.

    shared: the parameters. stages: the stages of each place here, by index.
    """

    def __init__(
        self, shared: Sequence[SharedParameter], stages: Mapping[Coordinate, StagesByIndex], mesh: Mesh
    ) -> None:
        self.shared, self._stages, self._mesh = tuple(shared), stages, mesh
        self.changed = True
        """Whether the copies may have changed outside of steps: the next step compares their bits."""
        self.loads = 0
        """How often a state was loaded."""
        self._steps = 0

    def parameters(self) -> list[nn.Parameter]:
        """All copies here."""
        return [copy for place in self._stages for _, copy in self._copies(place)]

    def elsewhere(self, place: Coordinate) -> set[str]:
        """The names at ``place`` of copies whose first copy lies on another rank: a norm counts the first copy only."""
        here = self._stages[place]
        return {
            name
            for shared in self.shared
            if shared.stages[0] not in here
            for stage, names in shared.uses
            if stage in here
            for name in names
        }

    def facts(self, training: bool) -> list[tuple[str, Facts]]:
        """What all ranks compare before a step: the facts of each place here, by the rank's name.

        training: whether a step begins. At the steps 1, 2, 4, 8, ... optimizers are looked up and bits compared.
        """
        if not self.shared:
            return []
        self._steps += training
        due = training and not self._steps & (self._steps - 1)
        optimizers = _optimizers() if due else []
        described = [
            (self._mesh.name(place), {
                _part(shared.name, copy): {
                    "trained": copy.requires_grad,
                    "bits": bits_of(copy) if due or self.changed else "",
                    "group": _group_of(copy, optimizers),
                }
                for shared, copy in self._copies(place)
            })
            for place in self._stages
        ]  # fmt: skip
        self.changed = False
        return described

    def loaded(self) -> None:
        """A state was loaded here."""
        self.changed = True
        self.loads += 1

    def load(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state`` with every name of a tied parameter of which it has one; raises `RuntimeFault` if two differ."""
        whole = dict(state)
        for shared in self.shared:
            present = [name for name in shared.names if name in state]
            for name in present[1:]:
                if state[name] is not state[present[0]] and not torch.equal(state[name], state[present[0]]):
                    raise RuntimeFault(
                        f"`{present[0]}` and `{name}` are one tied weight, and differ in the state dict",
                        "leave one of them out: it takes the value of the other",
                    )
            if present:
                whole |= {name: state[present[0]] for name in shared.names if name not in state}
        self.loaded()
        return whole

    def _copies(self, place: Coordinate) -> Iterator[tuple[SharedParameter, nn.Parameter]]:
        modules = {index: stage.module for index, stage in self._stages[place].items()}
        for shared in self.shared:
            if (copy := shared.of(modules)) is not None:
                yield shared, copy


def _part(name: str, copy: nn.Parameter) -> str:
    """The name of a copy, with the tensor rank whose part it is if tensor ranks split it: parts are not alike."""
    split = getattr(copy, "tensor_parallel", None)
    return name if split is None else f"{name} of tensor rank {split[2]}"


def check_tied_lines(program: Program, ties: Sequence[Tie]) -> None:
    """Raise `RuntimeFault` if the program was compiled for tied stages that the model does not tie."""
    written, cut = [tie.stages for tie in program.tied], [tie.stages for tie in ties]
    if not set(written) <= set(cut):
        raise RuntimeFault(
            f"the program was compiled for the tied stages {written}, the model as it is cut ties {cut or 'none'}",
            "leave `tied` out of the plan: a pipeline sees which weights are tied; or write what the model ties",
        )


def check_copies(everyone: Sequence[tuple[str, Facts]]) -> None:
    """Raise `RuntimeFault`, the same on every rank, where copies of a tied weight are not trained alike.

    everyone: the `TiedWeights.facts` of all ranks.
    """
    by_name: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for rank, facts in everyone:
        for name, fact in facts.items():
            by_name.setdefault(name, []).append((rank, fact))
    for name, copies in by_name.items():
        for field, says, help in _CHECKS:
            told = [(rank, fact[field]) for rank, fact in copies if fact[field] != UNKNOWN]
            for rank, value in told[1:]:
                first_rank, first = told[0]
                if value != first:
                    what = says(first_rank, first, rank, value)
                    raise RuntimeFault(f"the tied weight `{name}` {what}", help)


def _says_trained(first: str, trained: bool, rank: str, _: bool) -> str:
    return f"is trained on {first if trained else rank} and frozen on {rank if trained else first}"


def _says_bits(first: str, bits: str, rank: str, other: str) -> str:
    if bits and other:
        return f"has other values on {first} than on {rank}"
    return f"was loaded on {first if bits else rank} and not on {rank if bits else first}"


def _says_group(first: str, group: dict[str, Any] | None, rank: str, other: dict[str, Any] | None) -> str:
    if group is None or other is None:
        seen, unseen = (rank, first) if group is None else (first, rank)
        return f"is in an optimizer on {seen}, and in none on {unseen}"
    key = next(key for key in [*group, *other] if group.get(key) != other.get(key))
    return f"is optimized with {key} {group.get(key)} on {first} and {other.get(key)} on {rank}"


_CHECKS = (
    ("trained", _says_trained, "set requires_grad of all copies alike, on every rank"),
    (
        "bits",
        _says_bits,
        "begin with the same model on every rank (same seed), and load the same state dict on all of them",
    ),
    (
        "group",
        _says_group,
        "give every rank's optimizer `pipe.parameters()`, and put the copies into groups of the same hyperparameters:"
        " their gradients are equal, and so must be their updates",
    ),
)
"""Fields of `Facts`, in the order in which they are compared; the words for a difference; the remedy."""


def bits_of(parameter: Tensor) -> str:
    """A digest of the bits of a parameter of any shape; ``meta`` for one without values."""
    if parameter.is_meta:
        return "meta"
    digest = sha256()
    for piece in torch.split(parameter.detach().reshape(-1), _PIECE):
        # A copy, since memory that numpy has seen cannot be freed by FSDP2 any more.
        digest.update(piece.cpu().clone().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _optimizers() -> list[Optimizer]:
    """All optimizers of this process. Types are compared, since some objects answer `isinstance` by importing."""
    return [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]


def _group_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> dict[str, Any] | str | None:
    """Class and numbers of the group that has the parameter; None without an optimizer that has it.

    It is unknown where several have it: all but one may be left from an earlier run.
    """
    groups = [
        {"optimizer": type(optimizer).__name__, **{key: _plain(value) for key, value in group.items()}}
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(parameter is item for item in group["params"])
    ]
    if len(groups) > 1:
        return UNKNOWN
    return {key: value for key, value in groups[0].items() if value != ()} if groups else None


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON: numbers, flags and lists of them; an empty tuple for all else, as names."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else ()
    if isinstance(value, (tuple, list)):
        plain = [_plain(item) for item in value]
        return plain if plain and () not in plain else ()
    return value if isinstance(value, (bool, int, float)) or value is None else ()
