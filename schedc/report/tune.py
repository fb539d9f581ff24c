"""The result of a search for a better order: its facts as JSON, as text, and as the documentation of the order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedc.inputs import without_places
from schedc.ir.schedule import Schedule
from schedc.report import floors
from schedc.search.problem import ALL_SPLIT
from schedc.search.tune import JudgedSchedule, TuningResult
from schedc.units import equations

_ORIGINS = {
    "seed": "the order of the file: nothing better was found",
    "list": "a list schedule by priorities",
    "serial": "one microbatch after another",
    "search": "the search",
    "slots": "list schedules by slots, varied",
    "varied": "the order of the file and list schedules, varied",
    "paired wave": "the paired wave, varied",
}


def to_json(tuned: TuningResult) -> dict[str, Any]:
    """The facts that ``--json`` prints; times in time units of the costs, memory in the unit of `activation`."""
    schedule, time, effort = tuned.best.schedule, tuned.problem.time, tuned.effort
    return {
        "schema": "schedc.tune",
        "version": 1,
        "schedule": tuned.seed.schedule.name,
        "sizes": dict(schedule.sizes),
        "ranks": schedule.ranks,
        "ops": len(schedule),
        "objective": tuned.objective,
        "seed": _judged(tuned.seed),
        "found": _judged(tuned.best),
        "origin": tuned.origin,
        "improved": tuned.best is not tuned.seed,
        "lower_bound": tuned.bound,
        "own_bound": tuned.own_bound,
        "floor": None if tuned.floor is None else floors.facts(tuned.problem, tuned.floor),
        "gap": tuned.gap,
        "proven": tuned.proven,
        "limits": list(tuned.problem.limits),
        "memory": None if tuned.caps is None else tuned.caps.tolist(),
        "memory_unit": tuned.problem.cap_unit.size,
        "rounding": 0.0 if time.exact else time.cost(1),
        "search": None if tuned.search is None else {"status": tuned.search.status, "seconds": tuned.search.seconds},
        "untried": list(tuned.untried),
        "repeatable": tuned.search is None or effort.repeatable,
        "effort": {"seconds": effort.seconds, "work": effort.work, "workers": effort.workers, "seed": effort.seed},
    }


def _judged(order: JudgedSchedule) -> dict[str, Any]:
    return {
        "makespan": order.timeline.makespan,
        "span": float(order.timeline.span.max(initial=0)),
        "bubble_ratio": order.timeline.bubble_ratio,
        "peak_memory": order.peak.tolist(),
        "within_memory": order.fits,
    }


def to_text(tuned: TuningResult, facts: dict[str, Any]) -> str:
    """The result for people: values, bound, and the memory of each rank. facts: those of `to_json`."""
    objective, seed, best = tuned.objective, tuned.seed, tuned.best
    sizes = equations(facts["sizes"])
    over = "" if seed.fits else ", over the cap"
    lines = [
        f"{facts['schedule']} ({sizes}): {len(seed.schedule)} ops on {facts['ranks']} ranks",
        f"{objective} {seed.value:g} as it is{over}, {best.value:g} found ({_change(tuned)}); "
        f"lower bound {tuned.bound:g} ({_verdict(tuned)})",
        f"found by: {_ORIGINS.get(tuned.origin, f'the order of {tuned.origin}, varied')}",
        f"the bound holds for {_searched(tuned)}",
    ]
    if facts["floor"] is not None and tuned.bound == tuned.own_bound:
        lines.append(floors.line_of_tune(facts["floor"]))
    if facts["rounding"]:
        lines.append(f"for the search, times are rounded down to multiples of {facts['rounding']:.2g}")
    unit = tuned.problem.cap_unit
    lines.append(f"rank  memory: cap  as it is  found  ({unit})")
    caps = ["none"] * facts["ranks"] if tuned.caps is None else [f"{cap / unit.size:g}" for cap in tuned.caps]
    for rank, cap in enumerate(caps):
        lines.append(f"{rank:>4}  {cap:>11}  {seed.peak[rank] / unit.size:>8g}  {best.peak[rank] / unit.size:>5g}")
    lines += [f"not tried: {text}" for text in tuned.untried]
    if tuned.search is not None and not tuned.untried:
        lines.append(f"searched {tuned.search.seconds:.1f} s: {tuned.search.status}")
    return "\n".join(lines)


def _searched(tuned: TuningResult) -> str:
    """The orders for which the lower bound is proved."""
    free = tuned.freedom.split and ALL_SPLIT not in tuned.problem.limits
    split = ", with its backwards split or not" if free else ""
    limits = ", with this in common: " + "; ".join(tuned.problem.limits) if tuned.problem.limits else ""
    cap = "" if tuned.caps is None else " within the cap"
    pairs = ", with any pairs or none" if tuned.freedom.make_pairs else ""
    return f"every order of these ops{cap}{split}{pairs}{limits}"


def _change(tuned: TuningResult) -> str:
    if tuned.best is tuned.seed:
        return "no change"
    change = tuned.best.value / tuned.seed.value - 1 if tuned.seed.value else 0.0
    return f"{abs(change):.1%} {'shorter' if change <= 0 else 'longer'}"


def _verdict(tuned: TuningResult) -> str:
    return "reached: there is no better order" if tuned.proven else f"at most {tuned.gap:.2%} from the best"


def documented(tuned: TuningResult) -> Schedule:
    """The best order under the name of its seed; its documentation says the value, the bound and the cap."""
    seed = tuned.seed.schedule
    unit = tuned.problem.cap_unit
    cap = "no cap" if tuned.caps is None else "at most " + ", ".join(f"{c / unit.size:g}" for c in tuned.caps)
    summary = (
        f"Order of {seed.name} by schedc tune: {tuned.objective} {tuned.best.value:g}, lower bound "
        f"{tuned.bound:g}, memory {cap}{'' if tuned.caps is None else f' ({unit})'}."
    )
    doc = "\n".join([summary, seed.doc] if seed.doc else [summary])
    return replace(without_places(tuned.best.schedule), doc=doc)
