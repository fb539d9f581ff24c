"""Prices the cells of a schedule by what happens inside them: the method, orders and recomputation are the plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import CONTEXT_EXCHANGES, TENSOR_EXCHANGES, Lane, StageShape, role_in
from schedc.cell.issue_order import ExpertRanks
from schedc.cell.predict import predict
from schedc.cell.program import PlanOrder
from schedc.cell.rows import CellRows
from schedc.cell.schedule import cell_program
from schedc.cell.standard_blocks import BESIDE_LAYERS
from schedc.cell.table import SIZES, CellTable
from schedc.cell.taken_rows import taken_for
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.ops import OpKind
from schedc.ir.plan import NO_PLAN, Level, Method, Plan
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.plan.counts.copied_experts import copied_rows, rows_with_copies, step_copies
from schedc.plan.counts.copy_times import copy_by_itself, lane_of
from schedc.plan.counts.rows import chosen_method
from schedc.plan.layout.parts import DECODER, Layout, PartKind, refusal
from schedc.plan.recomputed_nodes import graphs_of, shares_of_forward
from schedc.source import Source
from schedc.step.cells.cell_pricing import CellPricing, price
from schedc.step.cells.group_pricing import RankRows, layers_of
from schedc.step.costs.checks import problem
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import EVERY_OP
from schedc.step.dependencies import Dependencies
from schedc.step.op_times import OpTimes
from schedc.step.placed_works import TimedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import CellTimes, Timeline


def price_cells(dependencies: Dependencies, costs: Costs, works: TimedWorks | None = None) -> CellPricing | None:
    """Prices a legal schedule by what happens inside its cells; None where the costs have no table of cells.

    works: what runs beside the cells.

    The method of exchanges, the written orders and the recomputation are those of the schedule's plan, if it has one.
    Raises `DiagnosticError` (S404) where the costs have blocks for another number of stages.
    """
    if costs.cell is None:
        return None
    schedule = dependencies.schedule
    table, orders, plan = _attached(schedule, costs)
    shapes = table.shapes(schedule.stages, plan.token_slices)
    group = with_microbatches(group_of(schedule, table, shapes, plan, costs.source), schedule, shapes, costs)
    plain, recomputed = graphs_of(shapes, plan)
    return price(dependencies, plain, table.costs, costs.p2p, orders.get, recomputed, group, works, table.ordering)


def price_order(dependencies: Dependencies, costs: Costs) -> Timeline:
    """The timeline ``late_wait`` of `price_cells` alone. costs: with a table of cells. Raises S404."""
    inside = price_cells(dependencies, costs)
    assert inside is not None
    return inside.late_wait


def communicated(schedule: Schedule, costs: Costs) -> tuple[Program, CellTimes | None]:
    """The program of a legal schedule, and the times from inside cells that order its messages, if the costs have any.

    Raises `DiagnosticError` as `price_cells` and `insert_communication` do.
    """
    dependencies = Dependencies.of(schedule)
    inside = price_cells(dependencies, costs)
    times = None if inside is None else inside.closed
    return insert_communication(schedule, costs, dependencies, times), times


def predicted(dependencies: Dependencies, costs: Costs, timeline: Timeline) -> Timeline:
    """The `price_order` of costs with a table of cells; else the timeline."""
    return timeline if costs.cell is None else price_order(dependencies, costs)


def op_times(schedule: Schedule, costs: Costs) -> OpTimes:
    """The predicted times of the cells of single ops and pairs, in the unit of ``costs``, which have a table of cells.

    A backward recomputes what its plan says, unless its stage has an R. Raises `DiagnosticError` (S404).
    """
    assert costs.cell is not None
    table, orders, plan = _attached(schedule, costs)
    plain, again = graphs_of(table.shapes(schedule.stages, plan.token_slices), plan)
    behind = set(schedule.stage[schedule.kind == OpKind.R].tolist())
    backward = [shape.ready if stage in behind else shape for stage, shape in enumerate(plain)]

    def alone(kind: OpKind, stage: int) -> float:
        halves = {OpKind.F: (plain[stage], None), OpKind.R: (None, again[stage])}
        return _duration(kind.name, *halves.get(kind, (None, backward[stage])), table)

    def pair(kind: str, first: int, second: int) -> float:
        graphs = (plain if kind[0] == "F" else backward)[first], backward[second]
        return _duration(kind, *graphs, table, orders.get(kind))

    stages = range(schedule.stages)
    used = set(schedule.kind.tolist())
    times = [[alone(kind, s) if kind in used else 0.0 for s in stages] for kind in OpKind]
    return OpTimes(times, pair, costs.p2p, costs.factors_of(schedule))


def _duration(
    kind: str,
    forward: StageShape | None,
    backward: StageShape | None,
    table: CellTable,
    order: PlanOrder | None = None,
) -> float:
    program = cell_program(kind, forward, backward, table.ordering, order)
    return predict(program, forward, backward, table.costs).duration


def stage_graphs(schedule: Schedule, costs: Costs) -> tuple[tuple[StageShape, ...], CellCosts]:
    """[stages] the graph of each stage, with the nodes that its backward recomputes, and the times of the nodes.

    costs: with a table of cells. Raises `DiagnosticError` (S404).
    """
    assert costs.cell is not None
    table, _, plan = _attached(schedule, costs)
    return graphs_of(table.shapes(schedule.stages, plan.token_slices), plan)[0], table.costs


def standard_table(schedule: Schedule) -> CellTable:
    """A table without times: one MoE block in every stage, with the exchanges of the schedule's plan."""
    plan = schedule.plan
    segments = {"shared": SegmentTimes(0.0)} if plan.experts and plan.experts.shared else {}
    lane = Lane.RAIL if plan.topology and plan.topology.nodes > 1 else Lane.NODE
    exchanges = [f"dispatch.{lane}"]
    if plan.copies_by_microbatch:
        exchanges.append(f"hot.{lane_of(plan)}")
    if _tells_distinct(plan):
        exchanges.append(f"distinct.{lane}")
    return CellTable(CellCosts.of(segments, dict.fromkeys(exchanges, 0.0)))


def _attached(schedule: Schedule, costs: Costs) -> tuple[CellTable, dict[str, PlanOrder], Plan]:
    """The table with the method of the plan, the plan's orders by kind of cell, and the plan. Raises S402 and S404."""
    table, source = costs.cell, costs.source
    assert table is not None
    for key in EVERY_OP:
        if np.any(getattr(costs, key)):
            message = f"`{key}` is given beside the table [cell], whose segments do not take it"
            raise DiagnosticError([problem("S402", message, source, key, f"add `{key}` to segments, and leave it out")])
    if len(table.blocks) not in (1, schedule.stages):
        message = f"`stages` has the blocks of {len(table.blocks)} stages, the schedule has {schedule.stages}"
        help = f"give {schedule.stages} texts, one per stage, or a single one for all"
        raise DiagnosticError([problem("S404", message, source, "stages", help=help)])
    _check_splits(table, schedule.plan, source)
    return *_planned(schedule, table), schedule.plan


def _check_splits(table: CellTable, plan: Plan, source: Source | None) -> None:
    """Raise S402 for times of exchanges among ranks that the plan does not have, and beside levels without prices."""
    for roles, axis in ((TENSOR_EXCHANGES, "tp"), (CONTEXT_EXCHANGES, "cp")):
        named = [role for role in roles if any(role_in(name) == role for name, _ in table.costs.exchanges)]
        alone = plan.parallel is not None and getattr(plan.parallel, axis) == 1
        if named and alone and not (axis == "tp" and plan.parallel is not None and plan.parallel.cp > 1):
            message = f"[cell] gives `{named[0]}` a time, and the plan has {axis} 1: its ranks exchange nothing there"
            help = f"leave `{named[0]}` out, or write `parallel {axis} 2` into the plan"
            raise DiagnosticError([problem("S402", message, source, named[0], help=help)])
    if plan.slices_of_tokens and "gather" not in table.splits:
        message = "`slices` of tokens, and [cell] has no exchanges of tensor ranks: they would change nothing"
        help = "give `gather` and `scatter` times in [cell], or write `slices` without `of tokens`"
        raise DiagnosticError([problem("S402", message, source, "stages", help=help)])
    levels = [each for each in plan.recompute if each.level > Level.NONE]
    single = any(each.layers or each.adaptive is not None for each in levels)
    partial = next((f"level `{each.level}`" for each in levels if each.level < Level.LAYER), "")
    if table.splits and (single or partial):
        what = "levels of single layers and ranks" if single else partial
        message = f"[cell] has exchanges of tensor or context ranks, beside which no time of {what} is known"
        help = "leave the level out, or give times of ops in place of [cell]"
        raise DiagnosticError([problem("S402", message, source, next(iter(table.splits)), help=help)])


def with_layout(table: CellTable, layout: Layout) -> CellTable:
    """The table with the blocks that a layout gives each stage.

    A multi-token prediction is a MoE block where the layout has MoE layers, else a dense one. Embedding, head, what a
    prediction takes behind its block, and what every op takes have a node where the table gives such a time. Without
    it their times belong to the first and the last segment.
    """
    if layout.losses > 1:
        message = f"{layout.losses} losses beside the table [cell], which has the head in the last stage"
        raise refusal(message, "write one L in the last stage, or give times of ops or of parts")
    timed = table.roles.intersection(BESIDE_LAYERS)
    blocks: dict[PartKind, tuple[str, ...]] = {kind: (kind.value,) for kind in DECODER}
    blocks |= {kind: (kind.value,) if kind in timed else () for kind in (PartKind.EMBEDDING, PartKind.HEAD)}
    predicted = "moe" if layout.total(PartKind.MOE) else "dense"
    blocks[PartKind.MTP] = (predicted, "mtp") if "mtp" in timed else (predicted,)
    first = ("op",) if "op" in timed else ()
    return table.with_blocks([
        (*first, *(block for part in parts for block in blocks.get(part.kind, ()))) for parts in layout.stages
    ])  # fmt: skip


def with_recomputation(costs: Costs, schedule: Schedule) -> Costs:
    """The costs with a time for the R of each stage: F times the share of its nodes in the forward.

    Where the R has no node it takes as long as inside the backward, or as F where that is not known.

    costs: with a table of cells for the layout, by `with_layout`. schedule: with its plan.
    """
    assert costs.cell is not None
    table, _ = _planned(schedule, costs.cell)
    shares = shares_of_forward(table.shapes(schedule.stages), schedule.plan, table.costs)
    known = costs.resolved(schedule.stages)
    alone = np.where(known.recompute_in_backward > 0, known.recompute_in_backward, known.F)
    return replace(costs, R=tuple(np.where(np.array(shares) < 1, known.F * shares, alone).tolist()))


def with_rows_of(schedule: Schedule, table: CellTable) -> CellTable:
    """The table with a record of rows by expert taken for the sizes of a schedule and its plan.

    Records of other experts, and those of rows by rank, stay: `group_of` refuses what does not fit.
    """
    record, plan = None if table.rows is None else table.rows.recorded, schedule.plan
    if record is None or record.by_expert is None or len(table.blocks) not in (1, schedule.stages):
        return table
    ranks = plan.topology.ranks if plan.topology else record.shape[2]
    experts, layers = record.by_expert.shape[4], sum(map(layers_of, table.shapes(schedule.stages)))
    if experts % ranks or not layers or (plan.experts and plan.experts.count != experts):
        return table
    rows = plan.tokens * plan.experts.top if plan.tokens and plan.experts else None
    taken = taken_for(record, layers, schedule.microbatches, ranks, rows)
    return replace(table, rows=CellRows(recorded=taken))


def _planned(schedule: Schedule, table: CellTable) -> tuple[CellTable, dict[str, PlanOrder]]:
    """The table with the method that the plan chooses, and the plan's written orders by kind of cell.

    With a capacity or bounded sizes the host is asked for no sizes. Copies of experts by microbatch are an exchange,
    whose time follows where rows and plan say how many there are. Other copies are none of a cell's exchanges. Where
    rows take two hops beside copies, ranks exchange numbers of distinct tokens, in no time unless the costs say one.
    """
    table = with_rows_of(schedule, table)
    if schedule.plan == NO_PLAN:
        return table, {}
    plan = schedule.plan
    if plan.capacity is not None or plan.bound is not None:
        table = table.without_exchange(SIZES)
    if not plan.copies_by_microbatch:
        table = table.without_exchange("hot")
    elif plan.balance is not None and table.rows is not None:
        _, time = copied_rows(plan, table.costs, table.rows)
        if time is not None:
            ordering = copy_by_itself(plan, table.costs)
            table = replace(
                table.without_exchange("hot").with_exchange(f"hot.{lane_of(plan)}", time), one_copy=ordering
            )
    distinct = f"distinct.{Lane.RAIL if plan.topology and plan.topology.nodes > 1 else Lane.NODE}"
    if not _tells_distinct(plan):
        table = table.without_exchange("distinct")
    elif distinct not in dict(table.costs.exchanges):
        table = table.with_exchange(distinct, SegmentTimes(0.0))
    method = _method(plan)
    orders = {cell.kind: PlanOrder(cell.compute, cell.communication) for cell in plan.cells}
    return table if method == Method.AUTO else replace(table, method=str(method)), orders


def _tells_distinct(plan: Plan) -> bool:
    """Whether ranks tell each other how many distinct tokens they send, once copies have moved rows of two hops."""
    return plan.balance is not None and _method(plan) not in (Method.FLAT, Method.AUTO)


def _method(plan: Plan) -> Method | str:
    """The method of the exchanges; `auto` where nothing chooses one."""
    choice = chosen_method(plan)
    return choice.method if choice else plan.method


def with_microbatches(
    group: RankRows | None, schedule: Schedule, shapes: Sequence[StageShape], costs: Costs
) -> RankRows | None:
    """The group with the factors of microbatches; one rank where ranks have equal rows. Raises S404 and S412."""
    factors = costs.factors_of(schedule)
    return group if factors is None else replace(group or RankRows(np.ones((1, 1, 1)), shapes), microbatches=factors)


def group_of(
    schedule: Schedule, table: CellTable, shapes: Sequence[StageShape], plan: Plan, source: Source | None
) -> RankRows | None:
    """The ranks of an expert group with their rows; None where the table does not give rows.

    Raises `DiagnosticError` (S404) for rows of another number of ranks, layers or microbatches.
    """
    if table.rows is None:
        return None
    topology, ranks = plan.topology, table.rows.ranks
    key = "per_rank" if table.rows.recorded is None else "recorded"
    findings: list[Diagnostic] = []
    if ranks is not None and topology is not None and ranks != topology.nodes * topology.per_node:
        message = f"`{key}` has the rows of {ranks} ranks, the plan's topology {topology.nodes} x {topology.per_node}"
        findings.append(problem("S404", message, source, key, help="give the rows of every rank of the expert group"))
    if table.rows.recorded is not None:
        record = table.rows.recorded
        layers, microbatches = record.shape[0], record.microbatches
        has = sum(map(layers_of, shapes)), schedule.microbatches
        if plan.experts and record.by_expert is not None and record.by_expert.shape[4] != plan.experts.count:
            message = f"`recorded` has {record.by_expert.shape[4]} experts, the plan {plan.experts.count}"
            findings.append(problem("S404", message, source, key, help="record a run of a model with as many experts"))
        elif (layers, microbatches) != has:
            message = (
                f"`recorded` has {layers} layers and {microbatches} microbatches, the schedule has "
                f"{has[0]} layers with experts and {has[1]} microbatches"
            )
            help = "record a run of this model at these sizes"
            findings.append(problem("S404", message, source, key, help=help))
    if findings:
        raise DiagnosticError(findings)
    members = None if ranks is None or topology is None else ExpertRanks(topology.nodes, topology.per_node)
    copied = rows_with_copies(plan, table.costs, table.rows)
    lasting = step_copies(plan, table.costs, copied)
    copies = None if copied.lasting else copied.busiest
    return RankRows(copied.factors, shapes, members, copies=copies, for_step=lasting, links=copied.links)
