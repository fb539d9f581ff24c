"""What the floors say of a schedule: the ranks' least bubbles as facts, and why no order has less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.compiler import Analysis
from schedc.search.bounds import OpWindows
from schedc.search.floors import RankFloor, rank_floors
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.tune import refuse_recomputation
from schedc.units import equations

_REACHED = 1e-9
"""Relative difference below which a makespan is the floor's."""


def of_analysis(analysis: Analysis) -> dict[str, Any]:
    """The floor of every order of a schedule's ops within the memory that each rank holds, as its facts.

    Raises `DiagnosticError` (S409) for a schedule with Rs.
    """
    refuse_recomputation(analysis.schedule)
    problem = problem_of(analysis.schedule, analysis.costs, analysis.memory.peak_memory, Freedom())
    known = rank_floors(OpWindows(problem))
    best = max(known, key=lambda floor: floor.makespan)
    makespan = problem.cost(best.makespan)
    return {
        **facts(problem, best),
        "reached": analysis.timeline.makespan <= makespan * (1 + _REACHED),
        "limits": list(problem.limits),
        "ranks": [facts(problem, floor) for floor in known],
    }


def facts(problem: SearchProblem, floor: RankFloor) -> dict[str, Any]:
    """The floor seen from a rank: times in the unit of the costs, memory in that of `activation`."""
    time = problem.time.cost
    return {
        "rank": floor.rank,
        "makespan": problem.cost(floor.makespan),
        "bubble": time(floor.idle),
        "before_backward": time(floor.before),
        "behind_forwards": time(floor.behind),
        "memory": None if floor.capacity is None else problem.memory.cost(floor.capacity),
        "pair_saves": time(floor.gain),
        "why": "; ".join(_why(problem, floor)),
    }


def _why(problem: SearchProblem, floor: RankFloor) -> Iterator[str]:
    """The parts of the rank's idle time, each with its reason. With pairs made, it has what lone ops cost."""

    def time(ticks: int) -> str:
        return f"{problem.time.cost(ticks):.10g}"

    def lost(ticks: int, lone: str, cost: int) -> str:
        return f"{time(ticks)} lost, as each {lone} in no pair costs {time(cost)}" if cost else f"{time(ticks)} idle"

    cap = "" if floor.capacity is None else f", as its memory of {_capacity(problem, floor)} allows"
    both = floor.apart
    if (both or floor.before + floor.ends >= floor.starts + floor.behind) and floor.before > floor.starts:
        until = f"before its first backward, at {time(floor.backward)} or later"
        runs = "gains by forwards" if floor.share else "runs forwards for"
        yield f"{until}, it {runs} {time(floor.filled)} at most{cap}: {lost(floor.before, 'forward', floor.share)}"
    elif floor.starts:
        yield f"it has nothing to run before {time(floor.starts)}"
    if (both or floor.before + floor.ends < floor.starts + floor.behind) and floor.behind > floor.ends:
        rest = f"at least {time(floor.rest)} follow its last forward"
        cost = floor.gain - floor.share
        yield f"{rest}, of which it works for {time(floor.left)} at most{cap}: {lost(floor.behind, 'backward', cost)}"
    elif floor.ends:
        yield f"{time(floor.ends)} follow its last op at least"


def _capacity(problem: SearchProblem, floor: RankFloor) -> str:
    return problem.cap_unit.amount(problem.memory.cost(floor.capacity or 0))


def to_text(floor: dict[str, Any]) -> Iterator[str]:
    """The floor of a schedule for people."""
    reached = "reached: no order is shorter" if floor["reached"] else "not reached"
    yield f"floor of the makespan {floor['makespan']:g} ({reached}), by rank {floor['rank']}"
    yield f"rank {floor['rank']} idles for {floor['bubble']:g} at least: {_reason(floor)}"
    common = ", with this in common: " + "; ".join(floor["limits"]) if floor["limits"] else ""
    yield f"the floor holds for every order of these ops within the memory that each rank holds here{common}"


def ranks_text(floor: dict[str, Any]) -> Iterator[str]:
    """The floor at one size, and that of each rank. floor: of `of_analysis` with ``sizes``; or ``none``, a reason."""
    if "none" in floor:
        yield f"no floor: {floor['none']}"
        return
    best, *rest = to_text(floor)
    yield f"at {equations(floor['sizes'])}: {best}"
    yield from rest
    for rank in floor["ranks"]:
        idle = f"idles for {rank['bubble']:g} at least: {_reason(rank)}"
        yield f"  rank {rank['rank']}: {rank['makespan']:g}, {idle}"


def line_of_tune(floor: dict[str, Any]) -> str:
    """The floor behind a bound of `schedc tune`."""
    does = "idles for or loses to lone ops" if floor["pair_saves"] else "idles for"
    return f"the bound is a floor: rank {floor['rank']} {does} {floor['bubble']:g} at least: {_reason(floor)}"


def _reason(floor: dict[str, Any]) -> str:
    """Why a rank idles so long, in words."""
    return floor["why"] or "it may run all the time"
