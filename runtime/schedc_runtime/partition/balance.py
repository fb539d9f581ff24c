"""Cuts a row of blocks into stages: as a layout or split points say, else so that the largest stage is smallest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from schedc.ir.arrays import Floats
from schedc.plan.layout.parts import DECODER, Layout, PartKind
from schedc_runtime.errors import PartitionError


def cuts_of(layout: Layout, names: Sequence[str], stages: int) -> list[int]:
    """[stages - 1] number of blocks before each cut.

    names: [blocks] in the order in which the model runs them: decoder layers, then multi-token predictions if any.
    Layer n of the layout is block n, under its name without paddings. Embedding and head run before the first block
    and after the last one.
    """
    if len(layout.stages) != stages:
        raise PartitionError(
            f"the layout has {len(layout.stages)} stages, {stages} are asked for",
            "a layout is made for one placement: lay the layers out again",
        )
    counts = [sum(part.kind in DECODER or part.kind is PartKind.MTP for part in parts) for parts in layout.stages]
    if sum(counts) != len(names):
        raise PartitionError(
            f"the layout has {layout.layers} layers and {layout.total(PartKind.MTP)} multi-token predictions,"
            f" the model has {len(names)} blocks",
            f"one block for each: {', '.join(names)}",
        )
    return list(accumulate(counts[:-1]))


def balanced_split(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """[stages - 1] number of blocks before each cut, with the least cost of the largest stage.

    costs: [blocks] any unit. first, last: additional cost of the first stage (embedding) and the last (norm, head).
    Among cuts with the least largest stage, those with the least sum of squares are taken. They spread blocks evenly,
    and leave a stage empty only if there are too few blocks.

    A dynamic program over (stage, blocks so far) with O(stages x blocks) vector operations.
    """
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    stage_cost = before[:, None] - before[None, :]
    heaviest = _solve(stage_cost, stages, first, last, limit=np.inf, combine=np.maximum)[1]
    # Sums of floats differ in their last bits with the order of addition. A relative slack keeps equal costs equal.
    limit = heaviest * (1 + 1e-12)
    return _solve(stage_cost, stages, first, last, limit=limit, combine=np.add)[0]


def _solve(
    stage_cost: Floats, stages: int, first: float, last: float, *, limit: float, combine: np.ufunc
) -> tuple[list[int], float]:
    """The best cuts and their value: the maximum of the stages' costs, or the sum of their squares."""
    blocks = stage_cost.shape[0] - 1
    allowed = np.tri(blocks + 1, dtype=bool)
    total = np.full(blocks + 1, np.inf)
    total[0] = 0.0
    choices = []
    for stage in range(stages):
        cost = stage_cost + first * (stage == 0) + last * (stage == stages - 1)
        value = cost if combine is np.maximum else cost**2
        value = np.where(allowed & (cost <= limit), value, np.inf)
        candidates = combine(total[None, :], value)
        choices.append(np.argmin(candidates, axis=1))
        total = np.min(candidates, axis=1)
    cuts = [blocks]
    for choice in reversed(choices[1:]):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[:0:-1], float(total[blocks])


def cut_at(names: Sequence[str], stages: int, split_points: Sequence[str]) -> list[int]:
    """[stages - 1] number of blocks before each cut. split_points: [stages - 1] names of blocks that begin a stage."""
    if len(split_points) != stages - 1:
        raise PartitionError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, not {stages}",
            "give one name per stage but the first: the block that begins it",
        )
    unknown = [name for name in split_points if name not in names]
    if unknown:
        raise PartitionError(f"split point `{unknown[0]}` is not a block", f"blocks: {', '.join(names)}")
    cuts = [names.index(name) for name in split_points]
    if cuts != sorted(cuts):
        raise PartitionError(
            f"split points {list(split_points)} are not in the order in which the model runs them",
            f"that order is: {', '.join(name for name in names if name in split_points)}",
        )
    return cuts


def choose_cuts(
    names: Sequence[str],
    parameters: Sequence[float],
    stages: int,
    costs: Sequence[float] | None,
    split_points: Sequence[str] | None,
    layout: Layout | None = None,
) -> list[int]:
    """[stages - 1] number of blocks before each cut: from a layout, from split points, or balanced by costs.

    names: [blocks]. parameters: [blocks + 2] number of parameters before the blocks, of each block, and after them.
    costs: [blocks + 2] replaces ``parameters``; [blocks] ignores the code before and after the blocks.
    """
    if stages < 1:
        raise PartitionError(f"{stages} stages asked for", "a model has at least one stage")
    if layout is not None:
        if costs is not None or split_points is not None:
            raise PartitionError("a layout beside costs or split points", "the layout says where the blocks are")
        return cuts_of(layout, names, stages)
    if split_points is not None:
        return cut_at(names, stages, split_points)
    if costs is None:
        chosen = list(parameters)
    elif len(costs) == len(names):
        chosen = [0.0, *costs, 0.0]
    elif len(costs) == len(names) + 2:
        chosen = list(costs)
    else:
        raise PartitionError(
            f"{len(costs)} costs for {len(names)} blocks",
            f"one per block ({', '.join(names)}), or two more: what is before the first block and after the last",
        )
    if not all(np.isfinite(cost) and cost >= 0 for cost in chosen):
        raise PartitionError(f"costs {list(chosen)} are not all finite and >= 0")
    return balanced_split(chosen[1:-1], stages, chosen[0], chosen[-1])
