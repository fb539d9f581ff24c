"""Chooses how experts are copied for `balance auto`: each candidate is the step under another plan.

The passes price it with the recorded rows. Without a record nothing can be compared, and copies last for a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.ir.contradictions import first_contradiction
from schedc.ir.plan import Balance, Hot, Plan
from schedc.plan.candidates import SAME_STEP, ChosenBalance, PricedCandidate
from schedc.plan.counts.copied_experts import copies_facts
from schedc.plan.held_memory import hot_slots
from schedc.plan.passes import Step, lower
from schedc.plan.price_cells import with_rows_of


class WayToCopy(NamedTuple):
    """A way to copy experts, and the plan with it in place of `balance auto`."""

    name: str
    applied: Callable[[Plan, Balance], Plan]


WAYS = (
    WayToCopy("none", lambda plan, _: replace(plan, balance=None)),
    WayToCopy("hot auto", lambda plan, _: replace(plan, balance=None, hot=Hot())),
    WayToCopy("by step", lambda plan, balance: replace(plan, balance=replace(balance, by="step"))),
    WayToCopy("by microbatch", lambda plan, balance: replace(plan, balance=replace(balance, by="microbatch"))),
)
"""The ways, the simplest first. Among equal steps the first way is taken."""


def choose_balance(step: Step) -> tuple[Plan, ChosenBalance]:
    """The plan with the candidate whose step is the shortest, and all of them.

    Without rows by expert the copies last for a step. Raises `DiagnosticError` (S158) where no candidate can be.
    """
    table, balance = step.given.cell, step.plan.balance
    assert balance is not None
    rows = None if table is None else table.rows
    if rows is None or rows.recorded is None or rows.recorded.by_expert is None:
        return _unmeasured(step, balance)
    priced = price_ways(step, balance)
    least = min(each.makespan for each in priced)
    if least == np.inf:
        notes = tuple(f"{each.name}: {each.refused}" for each in priced)
        raise DiagnosticError([step.lines.fault("balance", "S158", "no way to copy experts can be", notes=notes)])
    chosen = next(each for each in priced if each.makespan <= least * (1 + SAME_STEP))
    return chosen.plan, ChosenBalance(priced, chosen)


def price_ways(step: Step, balance: Balance, refused: str = "") -> tuple[PricedCandidate, ...]:
    """Each of `WAYS` with its price. refused: why no copies can be."""
    none, *others = WAYS
    if refused:
        rest = (PricedCandidate(each.name, step.plan, refused=refused) for each in others)
        return _priced(step, none, balance), *rest
    return tuple(_priced(step, each, balance) for each in WAYS)


def _unmeasured(step: Step, balance: Balance) -> tuple[Plan, ChosenBalance]:
    """Copies for a step: they are the cheapest, and divide rows anew in each microbatch."""
    plan = replace(step.plan, balance=replace(balance, by="step"))
    if refused := first_contradiction(plan):
        message = f"`balance auto` without a record of rows by expert is by step: {refused}"
        help = "give `--record routing.npz` beside a table [cell], or write `balance by microbatch`"
        raise DiagnosticError([step.lines.fault("balance", "S158", message, help)])
    return plan, ChosenBalance((), PricedCandidate("by step", plan))


def _priced(step: Step, candidate: WayToCopy, balance: Balance) -> PricedCandidate:
    plan = candidate.applied(step.plan, balance)
    if refused := first_contradiction(plan):
        return PricedCandidate(candidate.name, plan, refused=refused)
    try:
        lowered = lower(replace(step, plan=plan, done=step.done | {"balance"}), "predicted", "bytes")
    except DiagnosticError as error:
        return PricedCandidate(candidate.name, plan, refused=error.diagnostics[0].message)
    assert lowered.costs.cell is not None
    table = with_rows_of(lowered.schedule, lowered.costs.cell)
    assert table.rows is not None
    facts = copies_facts(plan, table.costs, table.rows)
    if facts["unpriced"]:
        return PricedCandidate(candidate.name, plan, copies=facts, refused=facts["unpriced"])
    return PricedCandidate(
        candidate.name,
        plan,
        lowered.predicted.makespan,
        float(hot_slots(plan, step.layout).held(lowered.schedule).max()),
        facts,
    )
