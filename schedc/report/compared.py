"""Compared schedules as JSON, and as a table with what wins where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from schedc.cell.table import write_blocks
from schedc.drawing.facts import costs_json, costs_text
from schedc.frontier.compared import ComparedSchedule, best_by_latency, best_by_memory, fitting
from schedc.step.costs.costs import Costs
from schedc.step.ratios import ratios


def to_json(
    ranks: int, microbatches: int, compared: Sequence[ComparedSchedule], costs: Costs, memory: float | None
) -> dict[str, Any]:
    """The facts that ``--json`` prints. Times are in the unit of the costs, memory is in microbatches of a rank."""
    fit = fitting(compared, memory)
    return {
        "schema": "schedc.compare",
        "version": 1,
        "ranks": ranks,
        "microbatches": microbatches,
        "costs": costs_json(costs),
        "memory": memory,
        "schedules": [_schedule(each, each in fit) for each in compared],
        "best_by_memory": [{"memory": least, "schedule": each.title} for least, each in best_by_memory(compared)],
        "best_by_latency": [
            {"p2p": latency, "schedules": [each.title for each in best]}
            for latency, best in best_by_latency(fit, costs)
            if best
        ],
    }


def _schedule(each: ComparedSchedule, fits: bool) -> dict[str, Any]:
    """A row; null is what a schedule that is not legal here has not."""
    point = each.point
    return {
        "schedule": each.name,
        "title": each.title,
        "refused": each.refused or None,
        "sizes": point and point.sized.sizes,
        "per_rank": point and point.sized.per_rank,
        "makespan": point and each.makespan,
        "bubble": point and point.bubble,
        "bubble_ratio": point and float(ratios(each.makespan, each.makespan - point.bubble)),
        "memory": point and point.memory,
        "copies": point and point.copies,
        "messages": point and each.messages,
        "needs": list(each.needs),
        "stages": write_blocks(each.blocks) or None,
        "fits": fits,
        "command": (point and point.command) or None,
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """A table of the schedules, and what wins where. facts: those of `to_json`."""
    inside = any(row["stages"] for row in facts["schedules"])
    where = f"P = {facts['ranks']}, M = {facts['microbatches']}"
    weighed = "activation" in facts["costs"]
    if inside:
        yield f"{where}: times from inside cells, in the unit of [cell]; memory in microbatches of a rank"
    else:
        what, unit = ("times", "; memory in the unit of `activation`") if weighed else ("times and memory", "")
        yield f"{where}: {what} in microbatches of a rank, which takes {costs_text(facts['costs'])}{unit}"
    rows = facts["schedules"]
    width = max(len(row["title"]) for row in rows)
    yield f"  {'schedule':<{width}}     step   bubble   ratio   memory  copies  messages  needs"
    for row in sorted(rows, key=lambda row: (row["makespan"] is None, row["makespan"] or 0)):
        if row["refused"]:
            yield f"  {row['title']:<{width}}  not compared: {row['refused']}"
            continue
        mark = " " if row["fits"] else ">"
        yield (
            f"{mark} {row['title']:<{width}}  {row['makespan']:>7.5g}  {row['bubble']:>7.4g}"
            f"  {row['bubble_ratio']:>6.4f}  {row['memory']:>7.4g}  {row['copies']:>6}  {row['messages']:>8}"
            f"  {', '.join(row['needs']) or '-'}"
        )
    if facts["memory"] is not None and any(row["fits"] is False and not row["refused"] for row in rows):
        yield f">: holds more than the {facts['memory']:g}{' microbatches' * (not weighed)} of --memory"
    yield from _winners(facts)


def _winners(facts: dict[str, Any]) -> Iterator[str]:
    for entry in facts["best_by_memory"]:
        yield f"shortest from memory {entry['memory']:.4g} on: {entry['schedule']}"
    latencies: dict[str, list[str]] = {}
    for entry in facts["best_by_latency"]:
        latencies.setdefault(", ".join(entry["schedules"]), []).append(f"{entry['p2p']:.4g}")
    for names, at in latencies.items():
        yield f"shortest at p2p = {', '.join(at)}: {names}"
    inside = any(row["stages"] for row in facts["schedules"])
    commands = [row["command"] for row in facts["schedules"] if row["command"]]
    if commands:
        same = "the same figures from inside cells:" if inside else "the same figures in chunks, v times as large:"
        yield same
        yield from (f"  {command}" for command in commands)
    divided: dict[str, list[str]] = {}
    for row in facts["schedules"]:
        if row["stages"] and row["per_rank"] > 1:
            divided.setdefault(row["stages"], []).append(row["title"])
    for blocks, titles in divided.items():
        yield f'with stages = "{blocks}" in [cell]: {", ".join(titles)}'
