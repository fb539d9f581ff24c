"""Reports a space of plans: what its plans have of each axis, what it leaves out and why, as JSON and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from schedc.planner.answers.space_facts import LINE, SpaceFact, space_facts
from schedc.planner.fit.fitted import Fit
from schedc.planner.space.conditions import PlanCondition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.report.figures import word
from schedc.report.plans import COLUMNS, title_text
from schedc.report.problem import problem_facts

_INDENT = 24
"""Characters before what is said of an axis."""


def space_to_json(problem: PlanProblem, fit: Fit | None, space: PlanSpace) -> dict[str, Any]:
    """What `schedc plan MODEL CLUSTER --space-facts --json` prints."""
    return {
        "schema": "schedc.space",
        "version": 1,
        **problem_facts(problem, fit),
        "raw": space.raw,
        "legal": sum(map(len, space.blocks())),
        "facts": table_json(space_facts(space, problem)),
    }


def table_json(facts: Sequence[SpaceFact]) -> list[dict[str, Any]]:
    """The table for JSON: of each row the axis, whether plans have the values, the values, and why they do not."""
    return [
        {"axis": fact.axis, "used": fact.used, "values": [_value(each) for each in fact.values], "why": fact.why}
        for fact in facts
    ]


def _value(value: Any) -> Any:
    """A value of an axis; of a level with the stages that it applies to, their names."""
    if not isinstance(value, tuple):
        return value
    return value[0] if value[1] == "all" else " ".join(value)


def restrictions(facts: Sequence[SpaceFact], conditions: Sequence[PlanCondition]) -> list[str]:
    """What no plan of the space has, as sentences: lines of plans, values that it chose, and conditions."""
    lines = [str(value) for fact in facts if fact.axis == LINE for value in fact.values]
    chosen = {fact.axis: None for fact in facts if fact.chosen}
    offered = (f"{fact.axis} {_listed(fact)}" for fact in facts if fact.used and fact.axis in chosen)
    split = (f"{_listed(fact)} not split by tp" for fact in facts if fact.axis == "parts that tp splits" and fact.why)
    texts: dict[str, list[str]] = {}
    for condition in conditions:
        texts.setdefault(condition.by, []).append(f"'{condition.text}'")
    told = (f"{by} {', '.join(own)}" for by, own in texts.items())
    return [f"no plan has the lines {', '.join(lines)}", *split, *offered, *told]


def _listed(fact: SpaceFact) -> str:
    return values_text([_value(value) for value in fact.values])


def space_text(facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan MODEL CLUSTER --space-facts`, of its JSON."""
    yield title_text(facts)
    yield f"{facts['raw']:,} points, {facts['legal']:,} legal plans"
    yield ""
    for axis, rows in groupby(facts["facts"], lambda row: str(row["axis"])):
        for number, row in enumerate(rows):
            values = values_text(row["values"]) or "none"
            said = f"has {values}" if row["used"] else f"no {values}: {row['why']}"
            before = f"{'' if number else axis:<{_INDENT}}"
            yield from textwrap.wrap(
                before + said, COLUMNS, subsequent_indent=" " * (_INDENT + 4), break_on_hyphens=False
            )


def values_text(values: Sequence[Any]) -> str:
    """Values in one line; of four and more numbers that follow each other, the ends."""
    parts: list[str] = []
    for _, group in groupby(enumerate(values), lambda pair: pair[1] - pair[0] if type(pair[1]) is int else pair[1]):
        run = [word(value) for _, value in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 3 else run
    return ", ".join(parts)
