"""The differences of two schedules: their facts as JSON, and as text in two columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.schedule import Schedule
from schedc.step.difference import Difference, RankDifference
from schedc.units import equations

_RANKS_SHOWN = 8


def to_json(difference: Difference) -> dict[str, Any]:
    """The facts that ``--json`` prints; times in time units of the costs."""
    return {"schema": "schedc.diff", "version": 1, **difference.to_json()}


def to_text(difference: Difference) -> Iterator[str]:
    """The differences for people, a line each: shapes, layers, the order of each rank, and the figures of both."""
    first, second = difference.schedules
    yield f"{_title(first)}  |  {_title(second)}"
    shapes = [(s.ranks, s.stages, s.microbatches) for s in difference.schedules]
    if shapes[0] != shapes[1]:
        yield "ranks, stages and microbatches differ: " + "  |  ".join(", ".join(map(str, shape)) for shape in shapes)
    if difference.equal:
        yield "order: the same on every rank"
    if first.layout != second.layout:
        yield "layers: " + "  |  ".join(s.layout or "nothing said" for s in difference.schedules)
    for rank in difference.ranks[:_RANKS_SHOWN]:
        yield from _rank(rank)
    if (more := len(difference.ranks) - _RANKS_SHOWN) > 0:
        yield f"and {more} more ranks"
    for figure in difference.figures:
        gap = figure.second - figure.first
        yield f"{figure.name:<19}  {figure.first:>12.6g}  {figure.second:>12.6g}" + (f"  {gap:+.6g}" if gap else "")


def _title(schedule: Schedule) -> str:
    return f"{schedule.name} ({equations(schedule.sizes)})"


def _rank(rank: RankDifference) -> Iterator[str]:
    left, right = (op or "the end" for op in rank.first)
    yield f"rank {rank.rank}: the orders part at op {rank.index}: {left}  |  {right}"
    words = ("only in the first", "only in the second", "moved", "paired otherwise")
    lists = (rank.missing, rank.added, rank.moved, rank.paired)
    for word, ops, count in zip(words, lists, rank.number, strict=True):
        if count:
            yield f"    {word}: {' '.join(ops)}" + (f" … ({count} in all)" if count > len(ops) else "")
