"""A ramp of batch sizes: one plan with fewer microbatches at first, as Megatron's ``--rampup-batch-size`` grows them.

Each size is trained for as many tokens, from the first one to the last but one; the full batch follows:

    sequences   1024      2048      3072      4096
    tokens     |---------|---------|---------|--------- ...
               0                             the ramp ends
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from schedc.diagnostics import DiagnosticError
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes


class RampAsked(NamedTuple):
    """A ramp from ``start`` to ``end`` sequences of a step, by ``increment`` at a time, over so many tokens."""

    start: int
    end: int
    increment: int
    tokens: float

    @property
    def sizes(self) -> range:
        """The sequences of a step, the full batch apart."""
        return range(self.start, self.end, self.increment)


class RampStep(NamedTuple):
    """A size of a ramp, by a plan.

    sequences: of a step. steps: number of steps. step_s: seconds of one; None where the plan cannot take the size.
    reason: why the plan cannot. taken: sequences of each step, which are more where the plan cannot take the
    size: as many as the next larger size has that the plan takes.
    """

    sequences: int
    steps: int
    step_s: float | None
    reason: str | None
    taken: int


def ramp_steps(asked: RampAsked, plan: PricedPlan) -> tuple[RampStep, ...]:
    """The sizes of a ramp, ascending, by a plan whose batch is its end."""
    problem, tokens, steps = plan.planned.problem, asked.tokens / len(asked.sizes), list[RampStep]()
    larger, seconds = plan.planned.axes.batch, plan.step
    for sequences in reversed(asked.sizes):
        price = step_at(plan, sequences)
        reason = price if isinstance(price, str) else None
        if not isinstance(price, str):
            larger, seconds = sequences, price
        count = ceil(tokens / (larger * problem.model.seq))
        steps.append(RampStep(sequences, count, None if reason else seconds, reason, larger))
    return tuple(reversed(steps))


def step_at(plan: PricedPlan, sequences: int) -> float | str:
    """Seconds of a step of so many sequences by the same plan, or why it cannot take them."""
    planned = plan.planned
    axes, problem, choice = planned.axes, replace(planned.problem, sequences=sequences), planned.choice
    inside = axes.dp * axes.microbatch
    if sequences % inside:
        return f"no multiple of dp * microbatch = {inside:,}"
    there: PlanAxes = replace(axes, microbatches=sequences // inside)
    if axes.limit not in choice.limits(*there.order_key):
        return f"{choice.name} does not take these microbatches on {axes.pp} ranks of {axes.vpp} stages"
    table = PartTable.of(problem, [axes.split])
    try:
        priced = price_plan(replace(planned, problem=problem, axes=there, table=table, number=None))
    except DiagnosticError as error:
        return error.diagnostics[0].message
    if not priced.fits:
        return f"a step needs {priced.needed / 1e9:.1f} GB of a device"
    return priced.step
