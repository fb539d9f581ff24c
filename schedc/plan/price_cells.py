"""What is told about the cells of a schedule: priced from inside where costs know them, as text and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedc.analysis.cell_pricing import CellKind, Inside, price
from schedc.analysis.dependencies import Dependencies
from schedc.cell.costs import CellCosts, Times
from schedc.cell.graph import EXCHANGE_LANES, Lane, StageShape
from schedc.cell.predict import hidden_share
from schedc.cell.program import PlanOrder
from schedc.cell.table import CellTable
from schedc.cost.checks import problem
from schedc.cost.costs import Costs
from schedc.diagnostics import DiagnosticError
from schedc.ir.schedule import Schedule
from schedc.layout.parts import DECODER, Kind, Layout
from schedc.plan import ExpertPlan, Method, plan_of
from schedc.plan.recomputed_nodes import of_backwards, of_recomputations, shares_of_forward
from schedc.plan.row_counts import chosen
from schedc.source import Source


def inside_of(dependencies: Dependencies, costs: Costs) -> Inside | None:
    """A legal schedule priced from inside; None where the costs say nothing of cells.

    How rows travel, the orders by hand, and what is recomputed are those of the plan, if the schedule has one. Raises
    `DiagnosticError` (S404) for blocks of another number of stages.
    """
    if costs.cell is None:
        return None
    schedule = dependencies.schedule
    table, orders, plan = _attached(schedule, costs.cell, costs.source)
    shapes = table.shapes(schedule.stages)
    again = of_recomputations(shapes, plan)
    return price(dependencies, of_backwards(shapes, plan), table.costs, costs.p2p, orders.get, again)


def stage_graphs(schedule: Schedule, costs: Costs) -> tuple[tuple[StageShape, ...], CellCosts]:
    """[stages] what each stage does, with what its backward does again, and the times of it.

    costs: that know of cells. Raises `DiagnosticError` (S404).
    """
    assert costs.cell is not None
    table, _, plan = _attached(schedule, costs.cell, costs.source)
    return of_backwards(table.shapes(schedule.stages), plan), table.costs


def standard_table(schedule: Schedule) -> CellTable:
    """One MoE block in every stage, without times: as experts and machine of the schedule's plan make it, else flat."""
    plan = plan_of(schedule)
    segments = {"shared": Times(0.0)} if plan.experts and plan.experts.shared else {}
    lane = Lane.RAIL if plan.topology and plan.topology.nodes > 1 else Lane.NODE
    exchanges = dict.fromkeys([f"dispatch.{lane}", *([f"hot.{lane}"] if plan.hot else [])], 0.0)
    return CellTable(CellCosts.of(segments, exchanges))


def _attached(
    schedule: Schedule, table: CellTable, source: Source | None
) -> tuple[CellTable, dict[str, PlanOrder], ExpertPlan]:
    """The table by the method of the plan, the orders of the plan by kind of cell, and the plan. Raises S404."""
    if len(table.blocks) not in (1, schedule.stages):
        message = f"`stages` has the blocks of {len(table.blocks)} stages, the schedule has {schedule.stages}"
        help = f"give {schedule.stages} texts, one per stage, or a single one for all"
        raise DiagnosticError([problem("S404", message, source, "stages", help=help)])
    return *_planned(schedule, table), plan_of(schedule)


def laid_out(table: CellTable, layout: Layout) -> CellTable:
    """With the blocks that a layout gives each stage. A multi-token prediction is a MoE block if there are any.

    Embedding and head have no node of their own; their times belong to the first and the last segment.
    """
    predicted = "moe" if layout.total(Kind.MOE) else "dense"
    names = {kind: kind.value for kind in DECODER} | {Kind.MTP: predicted}
    return table.with_blocks([[names[part.kind] for part in parts if part.kind in names] for parts in layout.stages])


def with_recomputation(costs: Costs, schedule: Schedule) -> Costs:
    """Costs that know cells with the R of each stage: as much of its F as the nodes that it does are of the forward.

    schedule: with the blocks of its layout in ``costs``, `laid_out`, and its plan.
    """
    assert costs.cell is not None
    table, _ = _planned(schedule, costs.cell)
    shares = shares_of_forward(table.shapes(schedule.stages), plan_of(schedule), table.costs)
    return replace(costs, R=tuple((costs.resolved(schedule.stages).F * shares).tolist()))


def _planned(schedule: Schedule, table: CellTable) -> tuple[CellTable, dict[str, PlanOrder]]:
    """The method that the plan chooses, and its orders by hand by kind of cell."""
    if not schedule.plan:
        return table, {}
    plan = plan_of(schedule)
    choice = chosen(plan)
    method = choice.method if choice else plan.method
    orders = {cell.kind: PlanOrder(cell.compute, cell.communication) for cell in plan.cells}
    return table if method == Method.AUTO else replace(table, method=str(method)), orders


def cells_json(inside: Inside) -> dict[str, Any]:
    """What ``--json`` says about cells; times in cost units.

    makespan: see `schedc.analysis.cell_pricing.Inside`; floor: what no order inside the cells goes below. idle: of a
    rank, on the average, between its cells and where it stands for messages inside.
    hidden_step: 1 - exposed / communication over all cells of all ranks; hidden_steady: over the overlapped pairs.
    shares: of the ranks' time from 0 to the makespan: computing, waiting for exchanges inside cells, idle between
    cells; they sum to 1, and the largest is what bounds the step.
    """
    communication, exposed = inside.communication()
    shares = _shares(inside)
    return {
        "makespan": {
            "atomic": inside.atomic.makespan,
            "overlapped": inside.overlapped.makespan,
            "early": inside.early.makespan,
            "inside": inside.timeline.makespan,
            "floor": inside.floor,
        },
        "idle": inside.idle,
        "communication": communication,
        "exposed": exposed,
        "hidden_step": inside.hidden_step,
        "hidden_steady": inside.hidden_steady,
        "lanes": {name: {"busy": busy, "exposed": open_} for name, (busy, open_) in inside.lanes.items()},
        "shares": shares,
        "bound": max(shares, key=lambda name: shares[name]),
        "kinds": [_kind_json(kind) for kind in inside.kinds],
    }


def _shares(inside: Inside) -> dict[str, float]:
    timeline = inside.timeline
    total = timeline.makespan * timeline.busy.size
    if not total:
        return {"compute": 1.0, "exposed": 0.0, "idle": 0.0}
    exposed = inside.communication()[1] / total
    busy = float(timeline.busy.sum()) / total
    return {"compute": busy - exposed, "exposed": exposed, "idle": 1 - busy}


def _removed(idle: dict[str, float]) -> float:
    """The share of the idle time that goes by sending early and waiting late."""
    return 1 - idle["inside"] / idle["overlapped"] if idle["overlapped"] else 0.0


def _kind_json(kind: CellKind) -> dict[str, Any]:
    found = kind.prediction
    return {
        "kind": kind.kind,
        "stages": list(kind.stages),
        "count": kind.count,
        "serial": kind.serial,
        "duration": found.duration,
        "compute": found.compute,
        "communication": found.communication,
        "exposed": found.exposed,
        "hidden": found.hidden,
        "lanes": {
            lane.value: {"busy": use.busy, "exposed": use.exposed}
            for lane, use in zip(EXCHANGE_LANES, found.lanes, strict=True)
        },
        "activation_at": found.activation_at,
        "gradient_at": found.gradient_at,
        "bound": found.bound,
    }


def cells_text(facts: dict[str, Any]) -> list[str]:
    """The lines of `cells_json` for people."""
    spans, idle = facts["makespan"], facts["idle"]
    steady = "" if facts["hidden_steady"] is None else f", {facts['hidden_steady']:.4f} in overlapped pairs"
    shares = ", ".join(f"{name} {share:.3f}" for name, share in facts["shares"].items())
    lines = [
        f"cells from inside: makespan {spans['inside']:g} (atomic {spans['atomic']:g}; overlapped, messages leave at "
        f"the ends of cells {spans['overlapped']:g}; no order inside cells goes below {spans['floor']:g})",
        f"idle {idle['inside']:g} of a rank: {_removed(idle):.4f} of it gone as messages leave early and are waited "
        f"for late (leaving at the ends of cells {idle['overlapped']:g}, waited for at once {idle['early']:g})",
        f"communication {facts['communication']:g}, exposed {facts['exposed']:g}: hidden {facts['hidden_step']:.4f} of "
        f"the step{steady}; time of the ranks: {shares}; bound by {facts['bound']}",
    ]
    for name, use in facts["lanes"].items():
        if use["busy"]:
            share = f"hidden {hidden_share(use['busy'], use['exposed']):.4f}"
            lines.append(f"{name}: communication {use['busy']:g}, exposed {use['exposed']:g}: {share}")
    columns = ("serial", "duration", "compute", "communication", "exposed")
    lines.append("cell  stages      count  " + "  ".join(columns) + "  hidden  rail exposed  node exposed  bound by")
    for kind in facts["kinds"]:
        pair = kind["stages"] if len(kind["kind"]) == 2 else kind["stages"][:1]
        figures = "  ".join(f"{kind[name]:>{len(name)}g}" for name in columns)
        lanes = "  ".join(f"{use['exposed']:>12g}" for use in kind["lanes"].values())
        stages = " & ".join(map(str, pair))
        figures += f"  {kind['hidden']:.4f}"
        lines.append(f"{kind['kind']:<4}  {stages:<10}  {kind['count']:>5}  {figures}  {lanes}  {kind['bound']}")
    return lines
