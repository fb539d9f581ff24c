"""`elaborate` makes a `Schedule` from the tree of a schedule and its sizes, by array arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError
from schedc.elaborate.assemble import ExpandedOrder, assemble_schedule
from schedc.elaborate.computed import ComputedExpander, WrittenOrder
from schedc.elaborate.computed_orders import AIMS
from schedc.elaborate.evaluate import RANK, Evaluator, Scope
from schedc.elaborate.expand import MAX_FINDINGS
from schedc.elaborate.names import checked
from schedc.elaborate.place import build_placement
from schedc.elaborate.segments import in_segments, out_of_order
from schedc.elaborate.sizes import (
    MAX_MICROBATCHES,
    bind_sizes,
    differ_from_defaults,
    lets_and_requires,
    parameter_of_role,
    segments_per_microbatch,
    unmet_requirement,
)
from schedc.ir.arrays import bincount
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.op_times import Pricer
from schedc.syntax import tree as t


def elaborate(
    tree: t.ScheduleTree, sizes: Mapping[str, int], costs: Costs | None = None, pricer: Pricer | None = None
) -> Schedule:
    """The order of every rank.

    sizes: value of each size; a missing one takes its default.
    costs: the costs under which a `policy` chooses; no other order depends on them. Default: unit costs.
    pricer: what knows more of the times of a step than ``costs``, and judges the orders of a `policy`.
    Raises `DiagnosticError` with codes S1. `verify` then checks that the order is complete and does not deadlock.
    """
    tree = checked(tree)
    bound = bind_sizes(tree, sizes)
    evaluator = Evaluator(tree.source, bound, {function.name: function for function in tree.functions})
    scope = file_scope(tree, evaluator, bound)
    ranks, microbatches = (bound[parameter_of_role(tree, role).name] for role in ("ranks", "microbatches"))
    parts = segments_per_microbatch(tree, bound)
    placement = in_segments(build_placement(tree.places[0], ranks, microbatches, evaluator, scope), parts)

    def written(choice: int) -> WrittenOrder:
        return _written(tree, evaluator, placement, scope, choice)

    first, policy = written(0), tree.ranks[0].policy if tree.has_policy else None
    if first.rule is None and (policy is None or len(policy.choices) == 1):
        schedule = first.schedule
    else:
        schedule = _fastest(tree.source, policy, first, written, costs or Costs(), pricer)
    if findings := out_of_order(schedule, parts):
        raise DiagnosticError(findings[:MAX_FINDINGS])
    return schedule


def _fastest(
    source: Source,
    policy: t.Policy | None,
    first: WrittenOrder,
    written: Callable[[int], WrittenOrder],
    costs: Costs,
    pricer: Pricer | None,
) -> Schedule:
    """The fastest order of the choices of a policy, or the computed order of a text. first: choice 0."""
    # Few schedules leave their order open; all others start faster without these imports.
    from schedc.elaborate.fastest import place_computed, refuse_too_many

    orders = [first]
    refuse_too_many(orders, source)
    if policy is None:
        return place_computed(orders, costs, source)
    for choice in range(1, len(policy.choices)):
        orders.append(written(choice))
        refuse_too_many(orders, source)
    return place_computed(orders, costs, source, AIMS[0] if policy.aim is None else policy.aim.id, pricer)


def _written(
    tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, scope: Scope, choice: int
) -> WrittenOrder:
    """The ops in the order of the text, with one choice of a `policy`, and the rule of its computed order."""
    block, ranks = tree.ranks[0], placement.ranks
    every = np.arange(ranks, dtype=np.int64)
    expander = ComputedExpander(evaluator, placement, choice=choice)
    rows = expander.body(block.body, Scope(ranks, {block.variable: every, RANK: every}, scope), "")
    if expander.findings:
        raise DiagnosticError(expander.findings[:MAX_FINDINGS])
    starts = np.concatenate([[0], np.cumsum(rows.per_instance(ranks))]).astype(np.int64)
    written_for = _written_for(tree, evaluator, placement, scope)
    expanded = ExpandedOrder(expander.items, rows.codes, starts)
    schedule = assemble_schedule(tree, evaluator, written_for or placement, expanded)
    schedule = schedule if written_for is None else _without_the_missing(schedule, placement)
    return WrittenOrder(schedule, expander.rule, np.array([item.computed for item in expander.items], bool))


def file_scope(tree: t.ScheduleTree, evaluator: Evaluator, sizes: Mapping[str, int]) -> Scope:
    """The sizes and the values of the `let`s outside of the rank block. Raises (S114) if a `require` fails."""
    scope = Scope(1, dict(sizes))
    failed: list[Diagnostic] = []
    for item in lets_and_requires(tree):
        if isinstance(item, t.Require):
            if not evaluator.value(item.condition, scope):
                failed.append(unmet_requirement(tree, item, sizes))
        elif failed:
            break  # a let, and all that follows it, may rely on the requirements above it
        else:
            scope.names[item.name] = evaluator.value(item.value, scope)
    if failed:
        raise (RequestError if differ_from_defaults(tree, sizes) else DiagnosticError)(failed)
    return scope


def _written_for(tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, scope: Scope) -> Placement | None:
    """The placement with the microbatches that ``order for`` gives each pipe; None if the text has no such line."""
    for order in tree.orders:
        parts = segments_per_microbatch(tree, evaluator.sizes)
        count = int(evaluator.value(order.microbatches, scope))
        most = int(np.diff(placement.first_microbatch).max()) // parts
        if not most <= count <= 2 * MAX_MICROBATCHES:
            message = f"the order is written for {count} microbatches, where a pipe has {most}"
            help = f"write `order for max({count}, {parameter_of_role(tree, 'microbatches').name})`, or the like"
            raise DiagnosticError([Diagnostic("S124", message, Label(order.span), help=help, source=tree.source)])
        return replace(placement, first_microbatch=tuple(count * parts * pipe for pipe in range(placement.pipes + 1)))
    return None


def _without_the_missing(schedule: Schedule, placement: Placement) -> Schedule:
    """The order without the ops of microbatches that ``placement`` does not have.

    An op whose partner is removed becomes a single op.
    """
    written = schedule.placement
    pipe = written.pipe_of_microbatch(schedule.microbatch)
    local = schedule.microbatch - np.asarray(written.first_microbatch)[pipe]
    first = np.asarray(placement.first_microbatch)
    kept = local < np.diff(first)[pipe]
    pair = schedule.pair[kept]
    alone = bincount(pair[pair >= 0], minlength=int(pair.max(initial=-1)) + 1) < 2
    return replace(
        schedule,
        placement=placement,
        rank_start=np.concatenate([[0], np.cumsum(kept)])[schedule.rank_start],
        kind=schedule.kind[kept],
        stage=schedule.stage[kept],
        microbatch=(local + first[pipe])[kept].astype(np.int32),
        pair=np.where((pair >= 0) & ~np.append(alone, False)[pair], pair, np.int32(-1)),
        phase=schedule.phase[kept],
        span=schedule.span[kept],
    )
