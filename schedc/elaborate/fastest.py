"""Chooses the fastest of the orders that a schedule with a computed order allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt

from schedc.check.computed_orders import AIMS
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.elaborate.in_turn import run_turns
from schedc.elaborate.list_schedule import list_schedule
from schedc.elaborate.rules import InTurn, Rule, Searched
from schedc.elaborate.simulated_order import SimulatedOrder, in_run_order
from schedc.elaborate.zero_bubble import WAYS, search, searchable
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.op_times import OpTimes, Pricer
from schedc.syntax import tree as t

MAX_COMPUTED = 4_000_000
"""Most ops of a computed order, summed over its choices, times the chunks of a rank: some seconds of work."""


@dataclass(frozen=True)
class WrittenOrder:
    """The ops in the order of the text.

    rule: orders the ops of the computed order; None if they run as written.
    computed: [spans] whether the ops of an item of the text belong to the computed order.
    """

    schedule: Schedule
    rule: Rule | None
    computed: npt.NDArray[np.bool_]


def number_of_choices(block: t.RankBlock) -> int:
    """Number of choices of the `policy` of a rank block; 1 if it has no policy."""
    policy = _policy(block)
    return 1 if policy is None else len(policy.choices)


def aim_of(block: t.RankBlock) -> str:
    """The time that the policy of a rank block minimizes: a name in `AIMS` and a field of `SimulatedOrder`."""
    policy = _policy(block)
    return AIMS[0] if policy is None or policy.aim is None else policy.aim.id


def has_policy(tree: t.ScheduleTree) -> bool:
    """Whether the order of a checked schedule depends on costs."""
    return any(_policy(block) is not None for block in tree.ranks)


def _policy(block: t.RankBlock) -> t.Policy | None:
    """The policy of a rank block, in the block itself or as the whole of a phase."""
    bodies = (statement.body if isinstance(statement, t.Phase) else (statement,) for statement in block.body)
    return next((inner for body in bodies for inner in body if isinstance(inner, t.Policy)), None)


def place_computed(
    orders: Sequence[WrittenOrder],
    costs: Costs,
    source: Source,
    aim: str = AIMS[0],
    pricer: Pricer | None = None,
) -> Schedule:
    """The first of the orders that take the least time under ``costs``.

    aim: the time that counts, of `AIMS`, in the time unit of the costs.
    pricer: gives the times by which a policy orders ops, and judges its orders, where it knows more than the costs of
        ops tell.
    An order that deadlocks is left out. If all of them do and the first deadlocks even as written, it is returned as
    written, and `verify` reports the fault. Raises `DiagnosticError`: S128 if only the rule makes it deadlock, S126 if
    a `search` cannot order these ops.
    """
    if len(orders) == 1 and orders[0].rule is None:
        return orders[0].schedule
    if findings := [_unsearchable(order, source) for order in orders if _is_unsearchable(order)]:
        raise DiagnosticError(findings)
    runs = [_run(order, order.rule, partial(_times, order, costs, pricer)) for order in orders]
    complete = [(order, ran) for order, ran in zip(orders, runs, strict=True) if ran.complete]
    if pricer is not None and len(complete) > 1:
        return _judged([_as_run(order, ran) for order, ran in complete], pricer, aim)
    if complete:
        return _as_run(*min(complete, key=lambda order_and_run: getattr(order_and_run[1], aim)))
    first = orders[0]
    if first.rule is not None and _run(first, None, partial(_times, first, costs, pricer)).complete:
        raise DiagnosticError([_stuck(first, runs[0], source)])
    return first.schedule


def _times(order: WrittenOrder, costs: Costs, pricer: Pricer | None) -> OpTimes:
    return OpTimes.of(costs, order.schedule.stages) if pricer is None else pricer.times(order.schedule)


def _as_run(order: WrittenOrder, ran: SimulatedOrder) -> Schedule:
    return order.schedule if order.rule is None else in_run_order(order.schedule, ran)


def _judged(schedules: Sequence[Schedule], pricer: Pricer, aim: str) -> Schedule:
    """The first schedule that is not legal, if any, for `verify` to report it; else the first of the shortest step."""
    steps = [pricer.step(schedule) for schedule in schedules]
    times = [-inf if step is None else getattr(step, aim) for step in steps]
    return schedules[times.index(min(times))]


def refuse_too_many(orders: Sequence[WrittenOrder], choices: int, source: Source) -> None:
    """Refuse (S120) orders that would take too long to compute, before further choices are expanded.

    orders: those expanded so far. choices: number of choices of the policy.
    """
    computed = choices > 1 or any(order.rule is not None for order in orders)
    work = sum(len(order.schedule) * order.schedule.placement.chunks * _ways(order.rule) for order in orders)
    if computed and work > MAX_COMPUTED:
        message = f"an order that is computed may have {MAX_COMPUTED:,} ops, times the chunks of a rank; here {work:,}"
        span = next((order.rule.span for order in orders if order.rule is not None), orders[0].schedule.spans[0])
        help = "use smaller sizes, or fewer choices"
        raise DiagnosticError([Diagnostic("S120", message, Label(span), help=help, source=source)])


def _ways(rule: Rule | None) -> int:
    """Number of orders that are simulated to find one."""
    return WAYS if isinstance(rule, Searched) else 1


def _is_unsearchable(order: WrittenOrder) -> bool:
    whole = order.computed.size > 0 and bool(order.computed[order.schedule.span].all())
    return isinstance(order.rule, Searched) and not (whole and searchable(order.schedule))


def _unsearchable(order: WrittenOrder, source: Source) -> Diagnostic:
    assert order.rule is not None
    message = "a search orders the F, I and W of every microbatch, of one stage per rank, and nothing beside them"
    help = "use `place linear` and { repeat M { F }  repeat M { I }  repeat M { W } }, or prefer and cap"
    return Diagnostic("S126", message, Label(order.rule.span), help=help, source=source)


def _run(order: WrittenOrder, rule: Rule | None, times: Callable[[], OpTimes]) -> SimulatedOrder:
    """One order by a rule. times: asked only where the rule follows them."""
    if isinstance(rule, Searched):
        return search(order.schedule, rule, times())
    if isinstance(rule, InTurn):
        return run_turns(order.schedule, rule)
    computed = order.computed[order.schedule.span] if order.computed.size else np.zeros(0, bool)
    return list_schedule(order.schedule, computed.tolist(), rule, times())


def _stuck(order: WrittenOrder, ran: SimulatedOrder, source: Source) -> Diagnostic:
    """The finding (S128) for a rule under which all ranks wait for each other. ran: the order up to there."""
    assert order.rule is not None
    left = np.setdiff1d(np.arange(len(order.schedule)), ran.rows)
    where = ", ".join(f"{name} = {value}" for name, value in order.schedule.sizes.items())
    message = f"under this rule all ranks come to wait, {left.size} ops before the end, for {where}"
    help = "raise the limit, or write the ops in an order that keeps within it"
    waiting = Label(order.schedule.spans[order.schedule.span[left[0]]], "the first op of the text that never runs")
    return Diagnostic("S128", message, Label(order.rule.span), (waiting,), help=help, source=source)
