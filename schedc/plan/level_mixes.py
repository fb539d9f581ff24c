"""Lists the mixes of levels that the layers of a stage may have: held activations, and time of recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.plan import Level, Plan, Recompute
from schedc.model.layer import Layer
from schedc.plan.counts.layers import DENSE_LEVELS, NO_TIMES, held_share, layer_of_kind, level_time
from schedc.plan.layout.costs import LayerCosts, PerKind
from schedc.plan.layout.parts import WORK, ModelPart, PartKind, layers_in

_PREFERENCE = 1e-6
"""Time that each further level of a layer counts, over its forward: of two mixes that take the same time the one that
recomputes less is taken."""


@dataclass(frozen=True)
class ChosenLevels:
    """Levels that the compiler chose, and the steps beside which they are judged. Times are makespans.

    plan: with the levels. stages: those whose levels were chosen. uncapped: nothing is recomputed in these stages.
    bound: no levels of their layers give less in this order of ops, whether inside backwards or in Rs directly before
    them. one_level: (level, makespan) of the best single level that fits; None where none does. level_per_stage:
    makespan of the best single level for each stage, likewise. limit: of the memory. held: [P] the peaks.
    tried: number of simulations. alone: makespans of levels alone and of offloads alone, where both were chosen; None
    for one that does not fit.
    """

    plan: Plan
    stages: tuple[int, ...]
    makespan: float
    uncapped: float
    bound: float
    one_level: tuple[Level, float] | None
    level_per_stage: float | None
    limit: float
    held: tuple[float, ...]
    tried: int
    seconds: float
    alone: tuple[float | None, float | None] | None = None


class Mix(NamedTuple):
    """Levels of the layers of a stage.

    held: activations of a microbatch, in the unit of the plan's memory. time: added to a backward. preferred: the same,
    and a little for whatever is recomputed. runs: (level, number of layers) from the stage's first layer on.
    """

    held: float
    time: float
    preferred: float
    runs: tuple[tuple[Level, int], ...]

    @property
    def recompute(self) -> Recompute:
        """The value for the stage."""
        if all(level is Level.NONE for level, _ in self.runs):
            return Recompute()
        return Recompute.of_layers(self.runs)


def mixes_of(
    plan: Plan,
    parts: Sequence[ModelPart],
    costs: LayerCosts,
    activation: float,
    time: float | PerKind,
    known: Mapping[tuple[str, str], float] = NO_TIMES,
) -> list[Mix]:
    """The undominated mixes of a stage, most held first.

    Layers of one kind are equal, so a mix counts them per level; every count is tried. The highest levels come first.
    parts: of the stage. activation: of a microbatch on it, without recomputation. time: of the stage's forward, a
    scalar, which layers share as ``costs`` say; or of a layer's forward, by kind. known: times of recomputations by
    kind and level, in place of shares by FLOPs.
    """
    held = _shares(parts, costs.activations) * activation
    spent = np.array(time, np.float64) if isinstance(time, PerKind) else _shares(parts, costs.time) * time
    outside = activation - sum(held[_COLUMN[part.kind]] for part in layers_in(parts))
    best = [Mix(outside, 0.0, 0.0, ())]
    for kind, group in groupby(layers_in(parts), key=lambda part: part.kind):
        levels = DENSE_LEVELS if kind is PartKind.DENSE else tuple(Level)
        again = {level: level_time(plan, kind, level, spent[_COLUMN[kind]], known) for level in levels}
        of_kind = _counts(layer_of_kind(plan, kind), again, len(list(group)), held[_COLUMN[kind]], spent[_COLUMN[kind]])
        best = undominated([_joined(mix, more) for mix in best for more in of_kind])
    return best


_COLUMN: dict[PartKind, int] = {kind: number for number, kind in enumerate(WORK)}


def _shares(parts: Sequence[ModelPart], table: Sequence[float]) -> Floats:
    """[kinds of `WORK`] the share that one part of each kind has of a stage."""
    whole = sum(table[_COLUMN[part.kind]] for part in parts if part.kind in _COLUMN)
    return np.array(table, np.float64) / whole if whole else np.zeros(len(table))


def _joined(mix: Mix, more: Mix) -> Mix:
    return Mix(mix.held + more.held, mix.time + more.time, mix.preferred + more.preferred, (*mix.runs, *more.runs))


def _counts(layer: Layer | None, again: Mapping[Level, float], layers: int, held: float, time: float) -> list[Mix]:
    """The mixes of so many layers of one kind. again: time of the recomputation at each of its levels.

    held, time: of a layer without recomputation.
    """
    levels = tuple(again)
    saved = np.array([held * held_share(layer, level) for level in levels])
    spent = np.array([*again.values()])
    preferred = spent + _PREFERENCE * (time or 1.0) * np.arange(len(levels))
    counts = np.zeros((1, len(levels)), np.int64)
    for _ in range(layers):
        more = (counts[:, None, :] + np.eye(len(levels), dtype=np.int64)).reshape(-1, len(levels))
        counts = np.unique(more, axis=0)
        counts = counts[_best(counts @ saved, counts @ preferred)]
    rows = zip(counts @ saved, counts @ spent, counts @ preferred, counts.tolist(), strict=True)
    return [Mix(float(h), float(t), float(p), _runs(row, levels)) for h, t, p, row in rows]


def _runs(counts: Sequence[int], levels: Sequence[Level]) -> tuple[tuple[Level, int], ...]:
    descending = reversed(list(zip(levels, counts, strict=True)))
    return tuple((level, number) for level, number in descending if number)


def _best(held: Floats, preferred: Floats) -> Int64:
    """Indices of the pairs that no other one undercuts in both, most held first."""
    order = np.lexsort((preferred, held))
    before = np.minimum.accumulate(np.concatenate([[np.inf], preferred[order][:-1]]))
    return np.asarray(order[preferred[order] < before][::-1])


def undominated(mixes: list[Mix]) -> list[Mix]:
    """The mixes that no other mix undercuts in both memory and preferred time, most held first."""
    held, preferred = (np.array([getattr(mix, name) for mix in mixes]) for name in ("held", "preferred"))
    return [mixes[number] for number in _best(held, preferred)]


def preference(forward: float, layers: int) -> float:
    """The most by which a mix of so many layers is preferred less than by its time. forward: time of the stage."""
    return _PREFERENCE * len(Level) * (forward + layers)
