"""Plans that move activations to host memory, for tests: their text, and their charts."""

from __future__ import annotations

from schedc.compiler import analyse
from schedc.drawing.chart import Chart
from schedc.load.library import Text
from schedc.plan.passes import Step
from schedc.source import Source

OFFLOADED = """sched 1

plan offloaded = dualpipev(P = 2, M = 8) {
  layers 4
  memory 3
  host 100 at 0.4
  offload auto
}
"""
"""A plan whose lanes are too slow, so that ranks stand at JOINs."""


def offloaded(text: str = OFFLOADED) -> Step:
    return analyse(Text(Source("offloaded.sched", text)), {})


def offloaded_chart(text: str = OFFLOADED) -> Chart:
    step = offloaded(text)
    return Chart.of(step.schedule, step.timeline, step.memory, step.costs, step.works)
