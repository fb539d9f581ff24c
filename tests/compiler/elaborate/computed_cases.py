"""Schedules with computed orders, costs of their stages, and the results."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.timeline import simulate
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree


def tree_of(body: str, place: str = "linear", head: str = "") -> ScheduleTree:
    """A schedule whose rank block begins on line 2."""
    text = f"schedule a(P: ranks = 2, M: microbatches = 2) {{ {head} place {place} rank r {{\n{body}\n}} }}"
    return parse(Source("test.sched", text)).schedules[0]


ALL = "repeat M { F }  repeat M { B }"


def orders(schedule: Schedule) -> list[list[str]]:
    return [[str(op) for op in schedule.ops(rank)] for rank in range(schedule.ranks)]


def findings(body: str, place: str = "linear", **sizes: int) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as caught:
        elaborate(tree_of(body, place), sizes)
    return caught.value.diagnostics


TIMES = st.integers(1, 8).map(float)


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> Costs:
    """Any times of any stages, pairs between their longer op and both, and some latency."""
    forward, inputs, weights = (draw(st.tuples(*[TIMES] * stages)) for _ in range(3))
    hidden = draw(st.sampled_from((0.0, 0.5, 1.0)))
    pair = tuple(max(f, i + w) + hidden * min(f, i + w) for f, i, w in zip(forward, inputs, weights, strict=True))
    return Costs(F=forward, I=inputs, W=weights, FB=pair, p2p=draw(st.sampled_from((0.0, 0.25, 2.0))))


def longest_span(schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    return float((timeline.span_bubble + timeline.busy).max())
