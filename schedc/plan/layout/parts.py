"""Models and layouts: the parts of a model, and which stage holds which, under the numbers of the unpadded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError

LARGEST = 65_536
"""The most parts of a layout, paddings included, and the most stages: more is a slip of the pen."""


class PartKind(StrEnum):
    """The kinds of parts of a model, in the order of the columns of `Layout.counts`."""

    EMBEDDING = "embedding"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"  # multi-token prediction
    HEAD = "head"  # and loss
    NOOP = "noop"  # padding: no parameters, no compute, no messages


DECODER = (PartKind.DENSE, PartKind.MOE)
WITH_EXPERTS = (PartKind.MOE, PartKind.MTP)
"""The kinds that have experts."""
WORK = tuple(kind for kind in PartKind if kind is not PartKind.NOOP)
"""The kinds that have costs: all but paddings."""
KIND_NAMES = {
    PartKind.DENSE: "dense layers",
    PartKind.MOE: "MoE layers",
    PartKind.MTP: "predictions",
    PartKind.EMBEDDING: "the embedding",
    PartKind.HEAD: "the head",
}
"""The kinds of `WORK` for people."""


class ModelPart(NamedTuple):
    """One part of a model. number: from 0, of a decoder layer or a prediction in the model; 0 for the others."""

    kind: PartKind
    number: int = 0


@dataclass(frozen=True)
class Model:
    """The parts of a model: embedding, ``layers`` decoder layers, ``mtp`` multi-token predictions, head.

    dense: how many of the first decoder layers are dense; the others are MoE. None: all are dense.
    Raises `DiagnosticError` (S143) for numbers that no model has.
    """

    layers: int
    dense: int | None = None
    mtp: int = 0

    def __post_init__(self) -> None:
        dense = self.layers if self.dense is None else self.dense
        if self.layers < 1 or self.mtp < 0 or self.layers + self.mtp > LARGEST or not 0 <= dense <= self.layers:
            raise refusal(
                f"no model has {self.layers} layers, {dense} of them dense, and {self.mtp} multi-token predictions",
                f"from 1 to {LARGEST} layers, and no more dense ones than layers",
            )

    def layer(self, number: int) -> ModelPart:
        """The decoder layer ``number``, from 0."""
        return ModelPart(PartKind.DENSE if self.dense is None or number < self.dense else PartKind.MOE, number)

    @property
    def decoder(self) -> tuple[ModelPart, ...]:
        """[layers] the decoder layers in order."""
        return tuple(self.layer(number) for number in range(self.layers))

    @property
    def predictions(self) -> tuple[ModelPart, ...]:
        """[mtp] the multi-token predictions in order."""
        return tuple(ModelPart(PartKind.MTP, number) for number in range(self.mtp))


@dataclass(frozen=True)
class Layout:
    """The parts of each stage, in order.

    The first stage begins with the embedding, and the last ends with the head. Decoder layers follow each other in
    order from stage to stage, and the predictions follow them. A stage may be empty. A padding leaves a place empty,
    anywhere; nothing runs for it. Raises `DiagnosticError` (S142) for another order.
    """

    stages: tuple[tuple[ModelPart, ...], ...]

    def __post_init__(self) -> None:
        parts = [(part, stage) for stage, held in enumerate(self.stages) for part in held]
        faults = list(order_faults(parts, len(self.stages)))
        if faults:
            raise DiagnosticError([Diagnostic("S142", fault.message, help=fault.help) for fault in faults])

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """[stages, kinds] number of parts of each kind."""
        table = np.zeros((len(self.stages), len(PartKind)), np.int64)
        column = {kind: number for number, kind in enumerate(PartKind)}
        for stage, parts in enumerate(self.stages):
            for part in parts:
                table[stage, column[part.kind]] += 1
        return table

    def total(self, *kinds: PartKind) -> int:
        """The number of parts of these kinds over all stages."""
        return int(self.counts[:, [list(PartKind).index(kind) for kind in kinds]].sum())

    @property
    def layers(self) -> int:
        """The number of decoder layers, without paddings."""
        return self.total(*DECODER)

    @property
    def model(self) -> Model:
        """The model of the layout. Raises `DiagnosticError` (S143) where a dense layer comes after a MoE layer."""
        dense = self.total(PartKind.DENSE)
        model = Model(self.layers, None if dense == self.layers else dense, self.total(PartKind.MTP))
        if [part for held in self.stages for part in held if part.kind in DECODER] != list(model.decoder):
            raise refusal("a dense layer after a MoE layer", "only layouts with the dense layers first are balanced")
        return model

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """The numbers of a stage's decoder layers."""
        return tuple(part.number for part in self.stages[stage] if part.kind in DECODER)


def layers_in(parts: Sequence[ModelPart]) -> list[ModelPart]:
    """The layers among the parts of a stage, in order, predictions included."""
    return [part for part in parts if part.kind in (*DECODER, PartKind.MTP)]


class Fault(NamedTuple):
    """A part out of place. place: its index among all parts; their number for a part that is missing at the end."""

    place: int
    message: str
    help: str


def order_faults(parts: Sequence[tuple[ModelPart, int]], stages: int) -> Iterator[Fault]:
    """The faults that keep (part, stage) pairs from being a `Layout`."""
    seen: dict[PartKind, int] = {}
    for index, (part, stage) in enumerate(parts):
        kind = part.kind
        if kind is PartKind.NOOP:
            continue
        before = seen.get(kind, 0)
        yield from (Fault(index, *text) for text in _misplaced(part, stage, stages, seen))
        seen[kind] = before + 1
    if not seen.get(PartKind.EMBEDDING):
        yield Fault(0, "no embedding", "begin with E")
    if not seen.get(PartKind.HEAD):
        yield Fault(len(parts), "no loss", "end with L")
    if not any(seen.get(kind) for kind in DECODER):
        yield Fault(len(parts), "no decoder layer", "write t for each layer")


def _misplaced(part: ModelPart, stage: int, stages: int, seen: dict[PartKind, int]) -> Iterator[tuple[str, str]]:
    """(message, help) for a part that must not follow the parts in ``seen``, a number per kind."""
    kind, before = part.kind, seen.get(part.kind, 0)
    numbered = before + (sum(seen.get(k, 0) for k in DECODER if k is not kind) if kind in DECODER else 0)
    if kind in (PartKind.EMBEDDING, PartKind.HEAD) and before:
        yield f"a second {_NAMES[kind]}", f"a model has one {_NAMES[kind]}"
    elif kind is PartKind.EMBEDDING and (stage or seen):
        yield (
            "the embedding is not at the start",
            "E is the first part of the first stage: it takes what enters a model",
        )
    elif kind is PartKind.HEAD and stage != stages - 1:
        yield "the loss is not in the last stage", "L belongs to the last stage: gradients start there"
    elif seen.get(PartKind.HEAD):
        yield f"{_NAMES[kind]} after the loss", "L is the last part of all"
    elif kind in DECODER and seen.get(PartKind.MTP):
        yield "a decoder layer after a multi-token prediction", "m comes after all t: it reads their result"
    elif part.number != numbered:
        yield f"{kind} number {part.number} where {numbered} is due", "parts follow each other in the model's order"


_NAMES = {
    PartKind.EMBEDDING: "embedding",
    PartKind.DENSE: "a decoder layer",
    PartKind.MOE: "a decoder layer",
    PartKind.MTP: "a multi-token prediction",
    PartKind.HEAD: "loss",
}


def refusal(message: str, help: str = "", code: str = "S143") -> DiagnosticError:
    """An error without a place in a text."""
    return DiagnosticError([Diagnostic(code, message, help=help)])
