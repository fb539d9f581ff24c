"""Chooses the fastest of the orders that a schedule with a computed order allows."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.elaborate.computed import WrittenOrder
from schedc.elaborate.computed_orders import AIMS
from schedc.elaborate.zero_bubble import WAYS, search_zero_bubble, searchable
from schedc.ir.schedule import Schedule
from schedc.ir.verify import verify
from schedc.source import Source
from schedc.step.choose import ChosenOrder, Ops, Preferring, choose
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies, needs_of, reduce_by_rank
from schedc.step.op_times import OpTimes, Pricer, StepTimes
from schedc.step.rules import InTurn, Rule, Searched
from schedc.step.timeline import durations, run_durations
from schedc.step.turn_loops import run_turns
from schedc.units import equations

MAX_COMPUTED = 4_000_000
"""Most ops of a computed order, summed over its choices, times the chunks of a rank: some seconds of work."""


def place_computed(
    orders: Sequence[WrittenOrder], costs: Costs, source: Source, aim: str = AIMS[0], pricer: Pricer | None = None
) -> Schedule:
    """The first of the orders that take the least time under ``costs``.

    aim: the time that counts, of `AIMS`, in the time unit of the costs.
    pricer: gives the times by which a policy orders ops, and judges its orders, where it knows more than the costs of
        ops tell.
    An order that deadlocks is left out. If all of them do, and the first deadlocks or lacks an op even as written, it
    is returned as written. `verify` then reports the fault.
    Raises `DiagnosticError`: S128 if only the rule makes it deadlock, S126 if a `search` cannot order these ops.
    """
    if findings := [_unsearchable(order, source) for order in orders if _is_unsearchable(order)]:
        raise DiagnosticError(findings)
    chosen = [_chosen(order, costs, pricer) for order in orders]
    complete = [dependencies for dependencies in chosen if isinstance(dependencies, Dependencies)]
    if len(complete) > 1:
        steps = [_step(each, costs) if pricer is None else pricer.step(each.schedule) for each in complete]
        times = [-inf if step is None else getattr(step, aim) for step in steps]
        return complete[times.index(min(times))].schedule
    if complete:
        return complete[0].schedule
    first, stuck = orders[0], chosen[0]
    if isinstance(stuck, ChosenOrder) and _runs(first.schedule) and not verify(first.schedule):
        raise DiagnosticError([_stuck(first, stuck, source)])
    return first.schedule


def _runs(schedule: Schedule) -> Dependencies | None:
    """The dependencies of a schedule that need not be legal; None where ops of it wait for ever."""
    dependencies, needs = Dependencies.of(schedule), needs_of(schedule)
    if (needs == len(schedule)).any() or dependencies.levels.stuck.size:
        return None
    (waiting,) = np.nonzero(needs[0] >= 0)
    early = dependencies.cell_of[needs[0][waiting]] < dependencies.cell_of[waiting]
    return dependencies if early.all() else None


def _step(dependencies: Dependencies, costs: Costs) -> StepTimes | None:
    """The step in this order; None for an order that is not legal, in which an op waits for ever."""
    table = costs.resolved(dependencies.schedule.stages)
    if dependencies.levels.stuck.size:
        return None
    start, end = run_durations(dependencies, durations(dependencies, table), table.p2p)
    first = reduce_by_rank(np.minimum, start, dependencies.rank_start)
    last = reduce_by_rank(np.maximum, end, dependencies.rank_start)
    return StepTimes(float(end.max(initial=0.0)), float((last - first).max(initial=0.0)))


def refuse_too_many(orders: Sequence[WrittenOrder], source: Source) -> None:
    """Refuse (S120) orders that would take too long to compute. orders: the choices of a policy expanded so far."""
    work = sum(len(order.schedule) * order.schedule.placement.chunks * _ways(order.rule) for order in orders)
    if work > MAX_COMPUTED:
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


def _chosen(order: WrittenOrder, costs: Costs, pricer: Pricer | None) -> Dependencies | ChosenOrder | None:
    """The dependencies in the order that the rule chooses; the order if it lacks ops, or None without a rule.

    pricer: gives the times that the rule follows; by default ``costs`` do.
    """
    schedule, rule = order.schedule, order.rule
    if rule is None:
        return _runs(schedule)
    if isinstance(rule, InTurn):
        chosen = run_turns(schedule, rule)
    else:
        times = OpTimes.of(costs, schedule) if pricer is None else pricer.times(schedule)
        if isinstance(rule, Searched):
            chosen = search_zero_bubble(schedule, rule, times)
        else:
            computed = order.computed[schedule.span].tolist() if order.computed.size else []
            chosen = choose(Ops.of(schedule, times), Preferring(schedule, computed, rule))
    return Dependencies.of(chosen.of(schedule)) if chosen.rows.size == len(schedule) else chosen


def _stuck(order: WrittenOrder, ran: ChosenOrder, source: Source) -> Diagnostic:
    """The finding (S128) for a rule under which all ranks wait for each other. ran: the order up to there."""
    assert order.rule is not None
    left = np.setdiff1d(np.arange(len(order.schedule)), ran.rows)
    where = equations(order.schedule.sizes)
    message = f"under this rule all ranks come to wait, {left.size} ops before the end, for {where}"
    help = "raise the limit, or write the ops in an order that keeps within it"
    waiting = Label(order.schedule.spans[order.schedule.span[left[0]]], "the first op of the text that never runs")
    return Diagnostic("S128", message, Label(order.rule.span), (waiting,), help=help, source=source)
