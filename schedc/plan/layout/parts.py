"""Models and layouts: the parts of a model, and which stage holds which, under the numbers of the unpadded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The kinds of parts of a model, in the order of the columns of `Layout.counts`. Those of `WORK` come first."""

    EMBEDDING = "embedding"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"  # multi-token prediction
    HEAD = "head"  # and loss
    NOOP = "noop"  # padding: no parameters, no compute, no messages
    MTP_EMBEDDING = "mtp embedding"  # that of the predictions, in the first stage


DECODER = (PartKind.DENSE, PartKind.MOE)
WITH_EXPERTS = (PartKind.MOE, PartKind.MTP)
"""The kinds that have experts."""
WORK = tuple(kind for kind in PartKind if kind not in (PartKind.NOOP, PartKind.MTP_EMBEDDING))
"""The kinds that have costs. The embedding of predictions in the first stage takes what the embedding looks up."""
KIND_NAMES = {
    PartKind.DENSE: "dense layers",
    PartKind.MOE: "MoE layers",
    PartKind.MTP: "predictions",
    PartKind.EMBEDDING: "the embedding",
    PartKind.HEAD: "the head",
}
"""The kinds of `WORK` for people."""


class ModelPart(NamedTuple):
    """One part of a model. number: from 0, of a decoder layer, a prediction or a loss; 0 for the others."""

    kind: PartKind
    number: int = 0


@dataclass(frozen=True)
class Model:
    """The parts of a model: embedding, ``layers`` decoder layers, ``mtp`` multi-token predictions, head.

    dense: how many of the first decoder layers are dense; the others are MoE. None: all are dense.
    losses: 1 for all outputs together, or ``mtp + 1`` for one per output, each with its head in a stage of its own.
    embeds_first: whether the first stage embeds the tokens of the predictions, too.
    Raises `DiagnosticError` (S143) for numbers that no model has.
    """

    layers: int
    dense: int | None = None
    mtp: int = 0
    losses: int = 1
    embeds_first: bool = False

    def __post_init__(self) -> None:
        dense = self.layers if self.dense is None else self.dense
        if self.layers < 1 or self.mtp < 0 or self.layers + self.mtp > LARGEST or not 0 <= dense <= self.layers:
            raise refusal(
                f"no model has {self.layers} layers, {dense} of them dense, and {self.mtp} multi-token predictions",
                f"from 1 to {LARGEST} layers, and no more dense ones than layers",
            )
        if self.losses not in (1, self.mtp + 1):
            outputs = f"{self.mtp + 1} output{'s' * (self.mtp > 0)}"
            raise refusal(
                f"{self.losses} losses of a model with {outputs}", "a model has one loss, or one for each output"
            )
        if self.embeds_first and not self.mtp:
            raise refusal("the embedding of a prediction in a model without one", "leave it out, or add a prediction")

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

    @property
    def entry(self) -> tuple[ModelPart, ...]:
        """The parts with which the first stage begins."""
        first = (ModelPart(PartKind.EMBEDDING),)
        return (*first, ModelPart(PartKind.MTP_EMBEDDING)) if self.embeds_first else first

    def heads(self, stages: int) -> dict[int, ModelPart]:
        """By stage, ascending: the heads with their losses, one in each of the last stages."""
        return {stages - self.losses + number: ModelPart(PartKind.HEAD, number) for number in range(self.losses)}


@dataclass(frozen=True)
class Layout:
    """The parts of each stage, in order.

    The first stage begins with the embedding, and the last ends with the head. Decoder layers follow each other in
    order from stage to stage, and the predictions follow them. A stage may be empty. A padding leaves a place empty,
    anywhere; nothing runs for it. With predictions there may be a head with a loss per output, each in a later stage
    than the one before. Raises `DiagnosticError` (S142) for another order.
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

    @cached_property
    def shares(self) -> npt.NDArray[np.float64]:
        """[stages, kinds of `WORK`] as `counts`, but each of several heads is a share of all: they split the outputs.

        Time and activations follow it. Parameters follow `counts`: each head is the whole table.
        """
        shares = self.counts[:, : len(WORK)].astype(np.float64)
        shares[:, WORK.index(PartKind.HEAD)] /= self.losses
        return shares

    @property
    def losses(self) -> int:
        """The number of stages that form a loss: 1, or the number of outputs."""
        return self.total(PartKind.HEAD)

    @property
    def embeds_first(self) -> bool:
        """Whether the first stage embeds the tokens of the predictions."""
        return self.total(PartKind.MTP_EMBEDDING) > 0

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """[stages - 1] values of one hidden state's size that go from stage k to k + 1.

        The decoder's state and those of predictions cross until the loss of their output and until the next prediction.
        The embedding of predictions in the first stage crosses until the last prediction.
        """
        return tuple(map(len, states_between(self)))

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
        numbers = self.layers, None if dense == self.layers else dense, self.total(PartKind.MTP)
        model = Model(*numbers, self.losses, self.embeds_first)
        if [part for held in self.stages for part in held if part.kind in DECODER] != list(model.decoder):
            raise refusal("a dense layer after a MoE layer", "only layouts with the dense layers first are balanced")
        return model

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """The numbers of a stage's decoder layers."""
        return tuple(part.number for part in self.stages[stage] if part.kind in DECODER)


def layers_in(parts: Sequence[ModelPart]) -> list[ModelPart]:
    """The layers among the parts of a stage, in order, predictions included."""
    return [part for part in parts if part.kind in (*DECODER, PartKind.MTP)]


def states_between(layout: Layout) -> list[list[str]]:
    """[stages - 1] the states that cross each boundary: `decoder`, `mtp 0`, ..., and `mtp embedding`."""
    at = {part: stage for stage, parts in enumerate(layout.stages) for part in parts if part.kind is not PartKind.NOOP}
    last = len(layout.stages) - 1
    predictions = [at[part] for part in sorted(at) if part.kind is PartKind.MTP]
    makers = {"decoder": 0} | {f"{PartKind.MTP} {number}": stage for number, stage in enumerate(predictions)}
    spans = {}
    for number, (name, made) in enumerate(makers.items()):
        loss = at[ModelPart(PartKind.HEAD, number)] if layout.losses > 1 else last
        spans[name] = made, max([loss, *predictions[number : number + 1]])
    if layout.embeds_first:
        spans[str(PartKind.MTP_EMBEDDING)] = 0, max(predictions)
    return [[name for name, (made, used) in spans.items() if made <= k < used] for k in range(last)]


class Fault(NamedTuple):
    """A part out of place. place: its index among all parts; their number for a part that is missing at the end."""

    place: int
    message: str
    help: str


def order_faults(parts: Sequence[tuple[ModelPart, int]], stages: int) -> Iterator[Fault]:
    """The faults that keep (part, stage) pairs from being a `Layout`."""
    seen: dict[PartKind, int] = {}
    heads = [index for index, (part, _) in enumerate(parts) if part.kind is PartKind.HEAD]
    outputs = 1 + sum(part.kind is PartKind.MTP for part, _ in parts)
    for index, (part, stage) in enumerate(parts):
        kind = part.kind
        if kind is PartKind.NOOP:
            continue
        before = seen.get(kind, 0)
        if kind is PartKind.HEAD:
            stage_before = parts[heads[before - 1]][1] if before else -1
            last = stages - 1 if index == heads[-1] else None
            surplus = _surplus_head(before, outputs)
            faults = iter([surplus]) if surplus else _misplaced_head(part, stage, stage_before, last, before)
        else:
            faults = _misplaced(part, stage, seen)
        yield from (Fault(index, *text) for text in faults)
        seen[kind] = before + 1
    yield from _missing(len(parts), seen, heads, [part.kind for part, _ in parts])


def _missing(
    end: int, seen: Mapping[PartKind, int], heads: Sequence[int], kinds: Sequence[PartKind]
) -> Iterator[Fault]:
    """The faults of parts that are not there, or not often enough. end: the number of parts."""
    outputs = seen.get(PartKind.MTP, 0) + 1
    if not seen.get(PartKind.EMBEDDING):
        yield Fault(0, "no embedding", "begin with E")
    if not heads:
        yield Fault(end, "no loss", "end with L")
    elif 1 < len(heads) < outputs:
        message = f"{len(heads)} losses of {outputs} outputs"
        yield Fault(heads[-1], message, "write one L for all outputs in the last stage, or one for each")
    if not any(seen.get(kind) for kind in DECODER):
        yield Fault(end, "no decoder layer", "write t for each layer")
    if PartKind.MTP_EMBEDDING in kinds and outputs == 1:
        place = kinds.index(PartKind.MTP_EMBEDDING)
        yield Fault(place, "the embedding of a prediction, and no prediction", "leave e out, or write m")


def _surplus_head(number: int, outputs: int) -> tuple[str, str] | None:
    """(message, help) for a head beyond the outputs of the model."""
    if number < outputs:
        return None
    message = "a second loss" if outputs == 1 else f"loss number {number} of {outputs} outputs"
    return message, "a model has one loss, or with predictions one for each output"


def _misplaced_head(
    part: ModelPart, stage: int, stage_before: int, last: int | None, number: int
) -> Iterator[tuple[str, str]]:
    """(message, help) for a head out of place.

    stage_before: that of the head before; -1 for none. last: the last stage, where this is the last head.
    """
    if stage == stage_before:
        yield "two losses in one stage", "write each L into a stage of its own, or one L for all outputs"
    elif last is not None and stage != last:
        yield "the loss is not in the last stage", "the last L belongs to the last stage: gradients start there"
    elif part.number != number:
        yield f"loss number {part.number} where {number} is due", "parts follow each other in the model's order"


def _misplaced(part: ModelPart, stage: int, seen: Mapping[PartKind, int]) -> Iterator[tuple[str, str]]:
    """(message, help) for a part that must not follow the parts in ``seen``, a number per kind."""
    kind, before = part.kind, seen.get(part.kind, 0)
    numbered = before + (sum(seen.get(k, 0) for k in DECODER if k is not kind) if kind in DECODER else 0)
    if kind in (PartKind.EMBEDDING, PartKind.MTP_EMBEDDING) and before:
        yield f"a second {_NAMES[kind]}", f"a model has one {_NAMES[kind]}"
    elif kind is PartKind.EMBEDDING and (stage or seen):
        yield (
            "the embedding is not at the start",
            "E is the first part of the first stage: E takes the model's inputs",
        )
    elif kind is PartKind.MTP_EMBEDDING and (stage or seen.keys() != {PartKind.EMBEDDING}):
        yield (
            "the embedding of a prediction is not behind E",
            "write e behind E in the first stage, or leave it out: the prediction's own stage then embeds",
        )
    elif seen.get(PartKind.HEAD):
        yield f"{_NAMES[kind]} after the loss", "only an L follows an L"
    elif kind in DECODER and seen.get(PartKind.MTP):
        yield "a decoder layer after a multi-token prediction", "m comes after all t: it reads their result"
    elif part.number != numbered:
        yield f"{kind} number {part.number} where {numbered} is due", "parts follow each other in the model's order"


_NAMES = {
    PartKind.EMBEDDING: "embedding",
    PartKind.MTP_EMBEDDING: "embedding of a prediction",
    PartKind.DENSE: "a decoder layer",
    PartKind.MOE: "a decoder layer",
    PartKind.MTP: "a multi-token prediction",
}


def refusal(message: str, help: str = "", code: str = "S143") -> DiagnosticError:
    """An error without a place in a text."""
    return DiagnosticError([Diagnostic(code, message, help=help)])
