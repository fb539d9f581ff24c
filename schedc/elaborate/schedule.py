"""`elaborate`: the tree of a schedule and its sizes to the `Schedule`, by array arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from schedc.check.names import check
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError
from schedc.elaborate.computed import ComputedExpander
from schedc.elaborate.evaluate import RANK, Evaluator, Scope
from schedc.elaborate.expand import Item, unpack
from schedc.elaborate.fastest import WrittenOrder, aim_of, number_of_choices, place_computed, refuse_too_many
from schedc.elaborate.numbering import Unnumbered, number
from schedc.elaborate.place import build_placement
from schedc.elaborate.segments import in_segments, out_of_order
from schedc.elaborate.sizes import MAX_MICROBATCHES, asked_for, bind_sizes, in_order, role, segments, unmet
from schedc.ir.arrays import bincount
from schedc.ir.ops import FACTS
from schedc.ir.placement import Placement
from schedc.ir.schedule import Int64, Schedule
from schedc.syntax import tree as t

_SHOWN = 10
"""Findings of one kind that are reported; more of them help nobody."""


def elaborate(tree: t.ScheduleTree, sizes: Mapping[str, int], costs: Costs | None = None) -> Schedule:
    """The order of every rank at ``sizes`` (missing ones take their defaults).

    costs: what a `policy` orders by; no other order depends on them. Default: unit costs.
    Raises `DiagnosticError` with codes S1. Whether the order is complete and runs is for `verify` to say.
    """
    if findings := check(tree):
        raise DiagnosticError(findings)
    bound = bind_sizes(tree, sizes)
    evaluator = Evaluator(tree.source, bound, {function.name: function for function in tree.functions})
    scope = _file_scope(tree, evaluator, bound)
    ranks, microbatches = bound[role(tree, "ranks").name], bound[role(tree, "microbatches").name]
    parts = segments(tree, bound)
    placement = in_segments(build_placement(tree.places[0], ranks, microbatches, evaluator, scope), parts)
    orders: list[WrittenOrder] = []
    choices, aim = number_of_choices(tree.ranks[0]), aim_of(tree.ranks[0])
    for choice in range(choices):
        orders.append(_written(tree, evaluator, placement, scope, choice))
        refuse_too_many(orders, choices, tree.source)
    schedule = place_computed(orders, costs or Costs(), tree.source, aim)
    if findings := out_of_order(schedule, parts):
        raise DiagnosticError(findings[:_SHOWN])
    return schedule


def _written(
    tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, scope: Scope, choice: int
) -> WrittenOrder:
    """The ops as they stand in the text, with one choice of a `policy`, and what is to be computed of them."""
    block, ranks = tree.ranks[0], placement.ranks
    every = np.arange(ranks, dtype=np.int64)
    expander = ComputedExpander(evaluator, placement, choice=choice)
    rows = expander.body(block.body, Scope(ranks, {block.variable: every, RANK: every}, scope), "")
    if expander.findings:
        raise DiagnosticError(expander.findings[:_SHOWN])
    starts = np.concatenate([[0], np.cumsum(rows.per_lane(ranks))]).astype(np.int64)
    written = _written_for(tree, evaluator, placement, scope)
    schedule = _assemble(tree, evaluator, placement, expander.items, rows.codes, starts, written)
    schedule = schedule if written is None else _without_the_missing(schedule, placement)
    return WrittenOrder(schedule, expander.rule, np.array([item.computed for item in expander.items], bool))


def _file_scope(tree: t.ScheduleTree, evaluator: Evaluator, sizes: Mapping[str, int]) -> Scope:
    """The sizes and the values of the `let`s outside of the rank block, the `require`s tested on the way."""
    scope = Scope(1, dict(sizes))
    failed: list[Diagnostic] = []
    for item in in_order(tree):
        if isinstance(item, t.Require):
            if not evaluator.value(item.condition, scope):
                failed.append(unmet(tree, item, sizes))
        elif failed:
            break  # a let may rely on what was required above it, and what follows on the let
        else:
            scope.names[item.name] = evaluator.value(item.value, scope)
    if failed:
        raise (RequestError if asked_for(tree, sizes) else DiagnosticError)(failed)
    return scope


def _written_for(tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, scope: Scope) -> Placement | None:
    """The placement with the microbatches that ``order for`` gives each pipe; None if there is no such line."""
    for order in tree.orders:
        parts = segments(tree, evaluator.sizes)
        count = int(evaluator.value(order.microbatches, scope))
        most = int(np.diff(placement.first_microbatch).max()) // parts
        if not most <= count <= 2 * MAX_MICROBATCHES:
            message = f"the order is written for {count} microbatches, where a pipe has {most}"
            help = f"write `order for max({count}, {role(tree, 'microbatches').name})`, or the like"
            raise DiagnosticError([Diagnostic("S124", message, Label(order.span), help=help, source=tree.source)])
        return replace(placement, first_microbatch=tuple(count * parts * pipe for pipe in range(placement.pipes + 1)))
    return None


def _without_the_missing(schedule: Schedule, placement: Placement) -> Schedule:
    """The order without the ops of microbatches that ``placement`` does not have; a pair may leave one op alone."""
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


def _assemble(
    tree: t.ScheduleTree,
    evaluator: Evaluator,
    placement: Placement,
    items: list[Item],
    codes: Int64,
    starts: Int64,
    written: Placement | None,
) -> Schedule:
    """Number the microbatches and write the columns, rank by rank so that little is held besides them.

    written: the placement with the microbatches that the order was written for, if not those of ``placement``.
    """
    placement = written or placement
    phases = tuple(dict.fromkeys(i.phase for i in items)) or ("",)
    kind_of = np.array([i.kind for i in items], np.int8)
    half_of = np.array([i.half for i in items], np.int8)
    phase_of = np.array([phases.index(i.phase) for i in items], np.int32)
    kind = np.empty(codes.size, np.int8)
    stage, microbatch, pair, phase, span = (np.empty(codes.size, np.int32) for _ in range(5))
    faults = _Faults(evaluator, items)
    parts = segments(tree, evaluator.sizes)
    first = np.asarray(placement.first_microbatch, np.int64)
    pairs = 0
    for rank in range(placement.ranks if items else 0):
        own = slice(int(starts[rank]), int(starts[rank + 1]))
        item, chunk, explicit = unpack(codes[own])
        kind[own] = kind_of[item]
        numbered = number(Unnumbered(kind[own], chunk, explicit, parts))
        faults.starved(rank, item, numbered.starved)
        known = np.maximum(numbered.chunk, 0)  # a starved W has no chunk, and is reported
        pipe = placement.pipe_of_chunk[rank][known]
        faults.too_many(rank, item, known, numbered.microbatch, np.diff(first)[pipe])
        stage[own] = placement.stage_of_chunk[rank][known]
        microbatch[own] = numbered.microbatch + first[pipe]
        half = half_of[item]
        pair[own] = np.where(half > 0, pairs - 1 + np.cumsum(half == 1), -1)
        pairs += int(np.count_nonzero(half == 1))
        phase[own] = phase_of[item]
        span[own] = item
    faults.report()
    return Schedule(
        name=tree.name,
        sizes=dict(evaluator.sizes),
        placement=placement,
        rank_start=starts,
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        pair=pair,
        phase=phase,
        span=span,
        phases=phases,
        spans=tuple(i.span for i in items) or (tree.span,),
        doc=tree.doc,
        source=tree.source,
    )


@dataclass
class _Faults:
    """Ops that can take no microbatch: the first of each op of the text, over the ranks."""

    evaluator: Evaluator
    items: list[Item]

    def __post_init__(self) -> None:
        self.found: dict[tuple[str, int], Diagnostic] = {}

    def starved(self, rank: int, item: Int64, rows: Int64) -> None:
        for row in rows[:1].tolist():
            message = "a weight gradient with no input gradient pending"
            self._add("S119", rank, int(item[row]), message, "each W takes the oldest I before it that no W has taken")

    def too_many(self, rank: int, item: Int64, chunk: Int64, microbatch: Int64, count: Int64) -> None:
        beyond = microbatch >= count
        if not beyond.any():
            return
        _, first = np.unique(item[beyond], return_index=True)
        for row in np.flatnonzero(beyond)[first[:_SHOWN]].tolist():
            name = FACTS[self.items[int(item[row])].kind].name
            message = f"{name} {microbatch[row] + 1} of chunk {chunk[row]}, which has {count[row]} microbatches"
            self._add("S118", rank, int(item[row]), message, "count what the phases before it do at these sizes")

    def _add(self, code: str, rank: int, item: int, message: str, help: str) -> None:
        if (code, item) not in self.found:
            where = self.evaluator.where(rank)
            label = Label(self.items[item].span)
            self.found[code, item] = Diagnostic(
                code, f"{message} for {where}", label, help=help, source=self.evaluator.source
            )

    def report(self) -> None:
        if self.found:
            raise DiagnosticError(sorted(self.found.values(), key=lambda d: d.primary.span)[:_SHOWN])
