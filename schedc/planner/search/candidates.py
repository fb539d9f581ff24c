"""All plans that may fit, ascending by bound: numbers of plans in blocks, not plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64
from schedc.planner.search.bound import BoundedBlock
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.blocks import PlanBlock


@dataclass(frozen=True, eq=False)
class Candidates:
    """Plans of a space that may fit, in the order of ``rank``.

    blocks: their grids. block, number: [plans] the grid of a plan and its flat index there. step, memory: [plans] its
    bounds. policy: [plans] whether its order follows the costs. legal: plans that were bounded. least: the plan with
    the least bound of memory.
    """

    blocks: tuple[PlanBlock, ...]
    block: Int64
    number: Int64
    step: Floats
    memory: Floats
    policy: Bools
    legal: int
    least: tuple[float, PlanAxes] | None

    def __len__(self) -> int:
        return int(self.number.size)

    def axes(self, place: int) -> PlanAxes:
        """The plan at a place of the order."""
        return self.blocks[int(self.block[place])].axes(int(self.number[place]))


def gather(bounded: Iterable[BoundedBlock], by_memory: bool = False) -> Candidates:
    """The candidates of all blocks, ascending by their bound of seconds, or of bytes."""
    blocks, legal, parts = [], 0, []
    least: tuple[float, PlanAxes] | None = None
    for number, each in enumerate(bounded):
        blocks.append(each.block)
        legal += len(each.block)
        least = _less(least, each)
        chosen = np.flatnonzero(each.fits)
        policies = np.array([option.choice.by_policy for option in each.block.inner.orders])
        places = np.unravel_index(chosen, each.fits.shape)
        memory = each.memory[(*places[:4], places[5])]
        parts.append((np.full(chosen.size, number), chosen, each.step.ravel()[chosen], memory, policies[places[1]]))
    columns: list[Any] = [np.concatenate([part[column] for part in parts]) for column in range(5)]
    order = np.argsort(columns[3 if by_memory else 2], kind="stable")
    block, numbers, step, memory, policy = (column[order] for column in columns)
    return Candidates(tuple(blocks), block, numbers, step, memory, policy, legal, least)


def _less(least: tuple[float, PlanAxes] | None, each: BoundedBlock) -> tuple[float, PlanAxes] | None:
    """The plan of least memory among those before and those of a block."""
    whole = np.where(each.block.legal, each.memory[:, :, :, :, None, :], np.inf)
    number = int(whole.argmin())
    bytes = float(whole.ravel()[number])
    return (bytes, each.block.axes(number)) if least is None or bytes < least[0] else least
