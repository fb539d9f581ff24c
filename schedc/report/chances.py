"""Reports plans that were compared under common draws: how often each is first, what decides, what to measure next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from schedc.planner.answers.drawn_plans import SEARCHES, ComparedPlans, DrawsAsked
from schedc.planner.answers.measuring import measured_by
from schedc.planner.times.constants import BY_NAME
from schedc.planner.times.skew import LOADS_NAME, LOADS_SAYS, LOADS_WIDTH
from schedc.report.figures import word

_SHOWN = 3
"""Constants, commands and further plans that the text names; JSON has all."""
_LEAST_WORTH = 0.05
"""Percent of a step: what is worth less would be printed as nothing."""


def add_chances(facts: dict[str, Any], compared: ComparedPlans, asked: DrawsAsked) -> None:
    """Adds to the JSON of a search what draws say of its plans, of those asked for, and of others.

    ``first_in``, ``within_5_pct``: shares of draws in which a plan is the fastest, and within 5 % of the fastest.
    ``loss_pct``: how much longer it takes than the fastest of each draw, on average. ``decided_by``: by pair of plans,
    the constants with their share of the variance between both. ``measure_next``: constants whose value is worth
    knowing, as the fall of the expected loss in percent of a step.
    """
    chances, entries = compared.chances, [*facts["plans"], *facts["also"]]
    for number, entry in enumerate(entries):
        entry |= _shares(compared, number)
    others = [number for number in range(compared.printed, len(compared.plans)) if chances.one_each[number]]
    others.sort(key=lambda number: -chances.first_in[number])
    names = [entry["file"].partition(".")[0] for entry in entries]
    names += ["" for _ in range(compared.printed, len(compared.plans))]
    for place, number in enumerate(others, 1):
        names[number] = f"other {place}"
    facts["chances"] = {
        "draws": asked.number,
        "seed": asked.seed,
        "loads": None
        if compared.constants.loads is None
        else {"median": compared.plans[0].problem.spread, "width": LOADS_WIDTH},
        "searches": SEARCHES,
        "others": [
            {"name": names[number], "axes": asdict(compared.plans[number].axes), **_shares(compared, number)}
            for number in others
        ],
    }
    facts["decided_by"] = [
        _decided(compared, first, second) | {"first": names[first], "second": names[second]}
        for first, second in _pairs(compared, len(facts["plans"]))
    ]
    facts["measure_next"] = [
        {"name": worth.name, "says": meaning_of(worth.name)}
        | {"worth_pct": 100.0 * worth.share, "command": measured_by(worth.name)}
        for worth in chances.worths(compared.logs, asked.seed)
    ]


def _decided(compared: ComparedPlans, first: int, second: int) -> dict[str, Any]:
    """What decides between two plans. gap_pct: by how much longer the second one takes."""
    deciding = compared.chances.deciding(first, second, compared.logs)
    constants = [each._asdict() | {"says": meaning_of(each.name)} for each in deciding]
    return {"gap_pct": _gaps(compared, first, second), "constants": constants}


def meaning_of(name: str) -> str:
    """What a constant is, in the words of its table."""
    return LOADS_SAYS if name == LOADS_NAME else BY_NAME[name].says


def _shares(compared: ComparedPlans, number: int) -> dict[str, Any]:
    chances = compared.chances
    return {
        "first_in": float(chances.first_in[number]),
        "within_5_pct": float(chances.within[number]),
        "loss_pct": 100.0 * float(chances.loss[number]),
    }


def _gaps(compared: ComparedPlans, first: int, second: int) -> dict[str, float]:
    """By how much longer the second plan takes, in percent: the median, and between which values 8 of 10 draws lie."""
    steps = compared.chances.steps
    low, median, high = np.quantile(100.0 * (steps[second] / steps[first] - 1.0), (0.1, 0.5, 0.9)).tolist()
    return {"low": low, "median": median, "high": high}


def _pairs(compared: ComparedPlans, plans: int) -> Iterator[tuple[int, int]]:
    """The plan that is first most often with the next one, and with each plan that is asked for."""
    first, second = compared.chances.favourites
    same = compared.chances.same
    asked = range(plans, compared.printed)
    seconds = dict.fromkeys(number for number in (second, *asked) if number is not None)
    yield from ((first, number) for number in seconds if same[number] != same[first])


# The text.


def chances_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """The sentences of a comparison. They say which plans are first, what decides, and what to measure next."""
    chances = facts["chances"]
    if chances is None:
        return
    yield _first_text(facts, chances)
    for other in [other for other in chances["others"] if other["first_in"] > 0][:_SHOWN]:
        yield f"{other['name']} is not among the best at the medians and {_share_text(other)}: {_differs(facts, other)}"
    yield from map(_decided_text, facts["decided_by"])
    yield _measure_text(facts["measure_next"])


def _first_text(facts: Mapping[str, Any], chances: Mapping[str, Any]) -> str:
    drawn = "constants"
    if chances["loads"] is not None:
        drawn += f" and of the loads of experts (a spread about {chances['loads']['median']:g}, assumed)"
    best = max(facts["plans"], key=lambda plan: plan["first_in"])
    texts = [f"{_name(plan)} is {_share_text(plan)}" for plan in (best, *facts["also"])]
    return f"under {chances['draws']:,} draws of the {drawn}, with memory as it is, {'; '.join(texts)}"


def _name(plan: Mapping[str, Any]) -> str:
    return f"the plan with {plan['asked']}" if "asked" in plan else str(plan["file"]).partition(".")[0]


def _share_text(plan: Mapping[str, Any]) -> str:
    first, within = (f"{100 * plan[key]:.0f} %" for key in ("first_in", "within_5_pct"))
    return f"first in {first} of the draws, within 5 % of the best in {within}"


def _differs(facts: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The axes in which a plan differs from the first one of the table."""
    best = facts["plans"][0]["axes"]
    differs = [f"{name} {word(value)}" for name, value in other["axes"].items() if value != best[name]]
    return f"the first one with {', '.join(differs)}"


def _decided_text(pair: Mapping[str, Any]) -> str:
    gap = pair["gap_pct"]
    times = f"{1 + gap['median'] / 100:.3f} times as long as {pair['first']}"
    text = f"{pair['second']} takes {times} ({1 + gap['low'] / 100:.3f} to {1 + gap['high'] / 100:.3f})"
    constants = [
        f"{each['says'].partition(';')[0]} ({each['name']}), {100 * each['share']:.0f} % of the ratio's variance"
        for each in pair["constants"][:_SHOWN]
    ]
    return f"{text}; what decides: {'; then '.join(constants) or 'no constant alone'}"


def _measure_text(worths: Sequence[Mapping[str, Any]]) -> str:
    commands: dict[str, Mapping[str, Any]] = {}
    for each in worths:
        if each["worth_pct"] < _LEAST_WORTH:
            continue
        commands.setdefault(each["command"], each)
    texts = [
        f"`{command}` is worth {each['worth_pct']:.1f} % of a step ({each['name']})"
        for command, each in commands.items()
    ]
    return f"measure next: {', '.join(texts[:_SHOWN]) or 'no constant changes which plan to choose'}"
