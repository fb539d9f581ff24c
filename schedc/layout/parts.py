"""What a layout is: for each stage the parts of the model that it holds, under the numbers of the unpadded model."""

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
"""Parts of a layout, paddings included, and its stages: more is a slip, and would only cost time and memory."""


class PartKind(StrEnum):
    """What a part of a model is. The order is that of the columns of `Layout.counts`."""

    EMBEDDING = "embedding"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"  # multi-token prediction
    HEAD = "head"  # and loss
    NOOP = "noop"  # padding: no parameters, no compute, no messages


DECODER = (PartKind.DENSE, PartKind.MOE)
WORK = tuple(kind for kind in PartKind if kind is not PartKind.NOOP)
"""The kinds that cost something."""


class ModelPart(NamedTuple):
    """One part. ``number`` counts the decoder layers of the model from 0, and the predictions; else it is 0."""

    kind: PartKind
    number: int = 0


@dataclass(frozen=True)
class Model:
    """The parts of a model: embedding, ``layers`` decoder layers, ``mtp`` multi-token predictions, head.

    dense: the first so many decoder layers are dense, the others MoE; None: all are dense.
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
        return tuple(self.layer(number) for number in range(self.layers))

    @property
    def predictions(self) -> tuple[ModelPart, ...]:
        return tuple(ModelPart(PartKind.MTP, number) for number in range(self.mtp))


@dataclass(frozen=True)
class Layout:
    """[stages] the parts of each stage, in order.

    The first stage begins with the embedding and the last ends with the head. Decoder layers follow each other in
    order from one stage to the next, then come the predictions; a stage may be empty. Paddings may stand anywhere:
    they say that a place is left empty, and nothing is run for them. Raises `DiagnosticError` (S142) otherwise.
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
        """Number of parts of these kinds, over all stages."""
        return int(self.counts[:, [list(PartKind).index(kind) for kind in kinds]].sum())

    @property
    def layers(self) -> int:
        """Number of decoder layers; paddings do not count."""
        return self.total(*DECODER)

    @property
    def model(self) -> Model:
        """The model that is laid out. Raises `DiagnosticError` (S143) where a dense layer comes after a MoE layer."""
        dense = self.total(PartKind.DENSE)
        model = Model(self.layers, None if dense == self.layers else dense, self.total(PartKind.MTP))
        if [part for held in self.stages for part in held if part.kind in DECODER] != list(model.decoder):
            raise refusal("a dense layer after a MoE layer", "only layouts with the dense layers first are balanced")
        return model

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Numbers of the decoder layers of a stage."""
        return tuple(part.number for part in self.stages[stage] if part.kind in DECODER)


class Fault(NamedTuple):
    """What is wrong in a row of parts: at part ``place``, or at its end where there is none."""

    place: int
    message: str
    help: str


def order_faults(parts: Sequence[tuple[ModelPart, int]], stages: int) -> Iterator[Fault]:
    """What keeps (part, stage) pairs from being a `Layout`."""
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
