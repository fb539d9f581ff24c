"""The frontier of a number of ranks and microbatches: its points and floors as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from schedc.drawing.html_frontier import FrontierPage, draw_frontier
from schedc.frontier.found import SearchedCell
from schedc.frontier.points import LINES, FloorLine, FrontierPoint
from schedc.inputs import open_input
from schedc.load.library import load
from schedc.step.costs.costs import Costs
from schedc.syntax.tree import ScheduleTree

_SAME = 1e-9
"""Difference below which two figures are equal."""


def to_json(
    ranks: int,
    microbatches: int,
    points: Sequence[FrontierPoint],
    lines: Sequence[FloorLine],
    searched: Sequence[SearchedCell] = (),
) -> dict[str, Any]:
    """The facts that ``--json`` prints. Times are in the unit of the costs, memory is in microbatches of a rank."""
    found = [cell for cell in searched if cell.point is not None]
    every = [*points, *(cell.point for cell in found if cell.point is not None)]
    cells = [None] * len(points) + found
    fronts = _front([(point.bubble, point.memory) for point in every])
    return {
        "schema": "schedc.frontier",
        "version": 1,
        "ranks": ranks,
        "microbatches": microbatches,
        "points": [
            {
                "schedule": point.sized.name,
                "sizes": point.sized.sizes,
                "per_rank": point.sized.per_rank,
                "copies": point.copies,
                "bubble": point.bubble,
                "memory": point.memory,
                "on_front": front,
                "found": cell is not None,
                "proven": cell is not None and cell.proven,
                "kept": "" if cell is None else cell.kept,
                "command": point.command,
            }
            for point, front, cell in zip(every, fronts, cells, strict=True)
        ],
        "searched": [_searched(cell) for cell in searched],
        "not_searched": [
            {"per_rank": line.per_rank, "memory": cap}
            for line in lines
            for cap in line.caps
            if (line.per_rank, cap) not in {(cell.per_rank, cell.memory) for cell in searched}
        ],
        "floors": [
            {"per_rank": line.per_rank, "memory": list(line.caps), "bubble": list(line.bubbles)} for line in lines
        ],
        "floors_missing": [v for v in LINES if v not in {line.per_rank for line in lines}],
    }


def _searched(cell: SearchedCell) -> dict[str, Any]:
    point = cell.point
    return {
        "per_rank": cell.per_rank,
        "memory": cell.memory,
        "bubble": None if point is None else point.bubble,
        "bound": None if point is None else cell.bound,
        "proven": cell.proven,
        "kept": cell.kept,
        "command": None if point is None else point.command,
    }


def page_of(
    facts: dict[str, Any], library: Sequence[FrontierPoint], searched: Sequence[SearchedCell], costs: Costs
) -> str:
    """The page of the frontier. facts: of `to_json`, for the same points, cells and costs."""
    trees = {point.sized.name: open_input(point.sized.name) for point in library}
    points = [*library, *(cell.point for cell in searched if cell.point is not None)]
    kept = {cell.kept: Path(cell.kept).read_text(encoding="utf-8") for cell in searched if cell.kept}
    shown = FrontierPage(
        facts=facts,
        costs={key: float(getattr(costs, key)) for key in ("F", "I", "W", "p2p")},
        orders=[point.sized.schedule for point in points],
        texts={name: load(name).text for name in trees} | kept,
        chosen=[name for name, tree in trees.items() if isinstance(tree, ScheduleTree) and tree.has_policy],
    )
    return draw_frontier(shown)


def _front(figures: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other has less of one figure and no more of the other."""

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        pairs = list(zip(one, other, strict=True))
        return all(a <= b + _SAME for a, b in pairs) and any(a < b - _SAME for a, b in pairs)

    return [not any(beats(other, one) for other in figures) for one in figures]


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """A table of the points by memory, and the floors. facts: those of `to_json`."""
    yield f"P = {facts['ranks']}, M = {facts['microbatches']}: bubble and memory in microbatches of a rank"
    yield "   memory   bubble   v  copies  command (its figures are v times as large)"
    for point in sorted(facts["points"], key=lambda each: (each["memory"], each["bubble"])):
        mark = "*" if point["on_front"] else " "
        yield (
            f"{mark} {point['memory']:>7.4g}  {point['bubble']:>7.4g}  {point['per_rank']:>2}  {point['copies']:>6}  "
            f"{point['command']}"
        )
    yield "*: no other row has less of one and no more of the other"
    yield "floors: the least bubble of any order with a split backward on one copy, with v stages per rank as in waves"
    for line in facts["floors"]:
        pairs = zip(line["memory"], line["bubble"], strict=True)
        yield f"v = {line['per_rank']}: " + ", ".join(f"{bubble:.4g} at {memory:g}" for memory, bubble in pairs)
    if missing := facts["floors_missing"]:
        yield f"no floor for v = {', '.join(map(str, missing))}: waves need a multiple of P microbatches"
    for cell in sorted(facts["searched"], key=lambda each: (each["per_rank"], each["memory"])):
        where = f"v = {cell['per_rank']}, memory {cell['memory']:g}"
        if cell["bubble"] is None:
            yield f"searched: {where}: no order was found"
            continue
        verdict = "proved the least" if cell["proven"] else f"no order has less than {cell['bound']:.4g}"
        how = "kept" if cell["kept"] else "searched"
        yield f"{how}: {where}: bubble {cell['bubble']:.4g}, {verdict}; {cell['command']}"
    if not facts["searched"]:
        yield "no order was searched between the points and the floors: --time searches some cells"
        return
    yield "proved: of all orders of these ops on waves with v stages per rank, in this memory, under these costs"
    left: dict[int, list[str]] = {}
    for cell in facts["not_searched"]:
        left.setdefault(cell["per_rank"], []).append(f"{cell['memory']:g}")
    for per_rank, memories in sorted(left.items()):
        yield f"not searched: v = {per_rank}, memory {', '.join(memories)}"
