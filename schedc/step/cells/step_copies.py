"""Copies of experts for a step inside its cells: weights beside the first forward, gradients behind the last W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.cell.graph import Lane
from schedc.ir.arrays import Floats, Int8, Int64
from schedc.ir.ops import FACTS, OpKind
from schedc.step.dependencies import Dependencies


@dataclass(frozen=True)
class StepCopies:
    """Exchanges of copies that last for a step, in time units.

    lane: of the links. members: groups of ranks that exchange with each other; None: all.
    weights, gradients: [layers] time on the busiest rank; 0 where nothing is copied.
    """

    lane: Lane
    members: tuple[tuple[int, ...], ...] | None
    weights: tuple[float, ...]
    gradients: tuple[float, ...]


class Travels(NamedTuple):
    """Exchanges of copies in a cell. out, back: layers of the stage whose weights leave, and whose gradients do."""

    out: tuple[int, ...] = ()
    back: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return len(self.out) + len(self.back)


NO_TRAVELS = Travels()


class CopyCell(NamedTuple):
    """A cell with exchanges of copies. time: [exchanges] as `Travels` names them, those of weights first."""

    cell: int
    travels: Travels
    time: Floats


def copy_cells(dependencies: Dependencies, copies: StepCopies, layers: tuple[Int64, Int64]) -> tuple[CopyCell, ...]:
    """The cells with exchanges of copies: the first F of each stage, and what completes its weight gradients.

    layers: [stages] the first layer with experts of each stage, and their number.
    """
    first = _cells_of(dependencies, [OpKind.F], last=False)
    last = _cells_of(dependencies, [kind for kind in OpKind if FACTS[kind].weight], last=True)
    result = []
    for cell in sorted({*first, *last}):
        out, back = (_copied(copies, layers, stages.get(cell, ())) for stages in (first, last))
        if out or back:
            time = [copies.weights[number] for _, number in out] + [copies.gradients[number] for _, number in back]
            travels = Travels(*(tuple(layer for layer, _ in each) for each in (out, back)))
            result.append(CopyCell(cell, travels, np.array(time)))
    return tuple(result)


def _copied(copies: StepCopies, layers: tuple[Int64, Int64], stages: Sequence[int]) -> list[tuple[int, int]]:
    """(layer of the stage, layer of the model) of each layer of these stages with copies."""
    begin, count = layers
    numbers = [(layer, int(begin[stage]) + layer) for stage in stages for layer in range(int(count[stage]))]
    return [each for each in numbers if copies.weights[each[1]] > 0]


def _cells_of(dependencies: Dependencies, kinds: Sequence[OpKind], last: bool) -> dict[int, tuple[int]]:
    """By cell the stage whose first op of some kinds on a rank runs there, or its last one."""
    schedule = dependencies.schedule
    cells = np.tile(np.arange(len(dependencies)), 2)
    ops = np.concatenate([dependencies.first, dependencies.second])
    kind: Int8 = schedule.kind[ops]
    own = np.flatnonzero((ops >= 0) & np.isin(kind, np.array(kinds, np.int8)))
    order = own[np.argsort(-cells[own] if last else cells[own], kind="stable")]
    key = dependencies.rank[cells[order]].astype(np.int64) * schedule.stages + schedule.stage[ops[order]]
    place = order[np.unique(key, return_index=True)[1]]
    return {int(cells[at]): (int(schedule.stage[ops[at]]),) for at in place}
