"""The public entry of the compiler: from a schedule's name or file to its Program, or to all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_dependencies
from schedc.analysis.memory import Memory, measure_memory
from schedc.analysis.timeline import Timeline, simulate
from schedc.claims.check import ClaimResult, check_claims
from schedc.cost.costs import Costs
from schedc.cost.given import check_given
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.fastest import has_policy
from schedc.inputs import Input, Order, open_input
from schedc.ir.program import Program
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.load.frozen import thaw
from schedc.load.library import Given, Plan
from schedc.passes.insert_communication import insert_communication
from schedc.syntax.tree import ScheduleTree

if TYPE_CHECKING:
    from schedc.analysis.cell_pricing import CellPricing
    from schedc.cell.table import CellTable
    from schedc.layout.parts import Layout
    from schedc.plan.read import ReadPlan


@dataclass(frozen=True)
class Analysis:
    """A legal schedule at one size and under one set of costs, with everything the compiler tells about it."""

    tree: Input
    schedule: Schedule
    costs: Costs
    dependencies: Dependencies
    timeline: Timeline
    memory: Memory
    claims: tuple[ClaimResult, ...]
    inside: CellPricing | None = None
    """The schedule priced by what happens inside of cells, where the costs know of it."""
    unplaced: Timeline | None = None
    """Of the schedule without the Rs that the compiler placed, where a plan asks for them: all inside of backwards."""

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings of a legal schedule: its claims that do not hold."""
        return tuple(claim.diagnostic for claim in self.claims if claim.diagnostic is not None)


def compile(source: Given, *, costs: Costs | None = None, **sizes: int) -> Program:
    """Compile a schedule to one instruction stream per rank.

    source: the name of a library schedule (``"dualpipev"``) or the path of a ``.sched`` file, a torch schedule CSV or
        a text form; ``"file.sched:name"`` is one of several schedules, or a plan; or a `schedc.load.library.Text`.
    costs: what orders the messages (of a plan: the costs of a layer); the order of compute depends on it only where
        the file says `policy`.
        Default: unit costs.
    sizes: values of the schedule's size parameters (``P=4, M=16``); the others take their defaults.

    The schedule is checked for completeness, order and deadlock. Its claims are not: that is `analyse`
    and ``schedc check``. Raises `DiagnosticError` with every finding.
    """
    return compile_at(source, sizes, costs)


def compile_at(source: Given, sizes: Mapping[str, int], costs: Costs | None = None) -> Program:
    """`compile` with the sizes as a mapping: they may have any name."""
    found = _priced(open_input(source), sizes, costs)
    return insert_communication(found.known.schedule, found.costs, found.known)


def legal_schedule(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> Schedule:
    """Elaborate and verify; raises `DiagnosticError` if any rank's order is incomplete, illegal or deadlocks.

    costs: those that a `policy` orders by, if its order is not frozen; default: unit costs. Of a plan they are the
    costs of a layer, see `priced`.
    """
    return _priced(tree, sizes, costs).known.schedule


def priced(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> tuple[Schedule, Costs]:
    """`legal_schedule` and what its stages cost: the given costs, but where a plan says which layers a stage holds.

    The order is that of the schedule alone, unless a `policy` follows costs: it follows those of the plan's stages.
    """
    found = _priced(tree, sizes, costs)
    return found.known.schedule, found.costs


@dataclass(frozen=True, eq=False)
class _Priced:
    """A legal schedule's dependencies, and what its stages cost.

    written: those of the schedule before the compiler placed Rs in it, where a plan asks for that; else None.
    """

    known: Dependencies
    costs: Costs
    written: Dependencies | None = None


def _priced(tree: Input, sizes: Mapping[str, int], costs: Costs | None) -> _Priced:
    costs = costs or Costs()
    if isinstance(tree, Plan):
        return _planned(tree, sizes, costs)
    known = _legal(tree, sizes, costs)
    check_given(costs, known.schedule)
    return _Priced(known, costs)


def _planned(tree: ReadPlan, sizes: Mapping[str, int], costs: Costs) -> _Priced:
    # Layouts are imported where they are used: most runs have none, and start faster without them.
    from schedc.layout.writer import write_layout
    from schedc.plan.apply import layer_costs, place_layers, stage_costs
    from schedc.plan.peak_memory import check_memory
    from schedc.plan.place_recomputation import place_recomputations, recompute_in_backwards
    from schedc.plan.resolve import resolve
    from schedc.plan.writer import write_plan

    known = _legal(tree.schedule, sizes, costs)
    check_given(costs, known.schedule)
    layout = place_layers(tree.directives, known.schedule)
    plan = resolve(tree.directives, known.schedule, layout)
    of_stages = stage_costs(tree.directives, layout, costs, plan)
    if has_policy(tree.schedule):
        known = _legal(tree.schedule, sizes, of_stages)
    text, layers = write_layout(layout), layout.layers
    schedule = replace(known.schedule, name=tree.name, doc=tree.doc, layout=text, layers=layers, plan=write_plan(plan))
    known = replace(known, schedule=schedule)
    bubbles = [level.bubbles for level in plan.recompute]
    if costs.cell is not None:
        of_stages = _from_inside(of_stages, costs.cell, layout, schedule, any(bubbles))
    written = known if any(bubbles) else None
    if written is not None:
        of_stages = recompute_in_backwards(of_stages, bubbles)
        known = place_recomputations(written, of_stages, bubbles)
    check_memory(tree.tree, plan, layout, layer_costs(tree.directives), known, of_stages)
    return _Priced(known, of_stages, written)


def _from_inside(costs: Costs, cell: CellTable, layout: Layout, schedule: Schedule, bubbles: bool) -> Costs:
    """The costs of stages with the table of their blocks; where there are Rs, or are to be, with their time by it."""
    from schedc.plan.price_cells import with_layout, with_recomputation

    costs = replace(costs, cell=with_layout(cell, layout))
    recomputes = bubbles or has_recomputation(schedule)
    return with_recomputation(costs, schedule) if recomputes and costs.R is None else costs


def _legal(tree: ScheduleTree | Order, sizes: Mapping[str, int], costs: Costs) -> Dependencies:
    """The dependencies of a legal schedule, which the check for deadlocks has found already."""
    if isinstance(tree, Order):
        return Dependencies.of(tree.at(sizes))  # judged when it was read
    if (frozen := thaw(tree, sizes)) is not None:
        return Dependencies.of(frozen)
    known, findings = check_dependencies(elaborate(tree, sizes, costs))
    if known is None or findings:
        raise DiagnosticError(findings)
    return known


def analyse(source: Given, sizes: Mapping[str, int], costs: Costs | None = None) -> Analysis:
    """Check a schedule and measure it: timeline, memory and claims. Raises `DiagnosticError` if it is not legal."""
    tree = open_input(source)
    found = _priced(tree, sizes, costs)
    dependencies, costs = found.known, found.costs
    written = dependencies if found.written is None else found.written
    schedule = dependencies.schedule
    memory = measure_memory(schedule, costs, dependencies)
    claims = check_claims(
        tree.claims,
        written.schedule,
        costs,
        dependencies=written,
        memory=memory if written is dependencies else None,
        follows_costs=_follows_costs(tree, sizes),
    )
    return Analysis(
        tree,
        schedule,
        costs,
        dependencies,
        simulate(schedule, costs, dependencies),
        memory,
        tuple(claims),
        _inside(dependencies, costs),
        None if found.written is None else simulate(written.schedule, costs, written),
    )


def _follows_costs(tree: Input, sizes: Mapping[str, int]) -> bool:
    """Whether the order was chosen by the costs: by a `policy`, unless the choice is kept beside the file."""
    if isinstance(tree, Order):
        return False
    schedule = tree.schedule if isinstance(tree, Plan) else tree
    return has_policy(schedule) and thaw(schedule, sizes) is None


def _inside(dependencies: Dependencies, costs: Costs) -> CellPricing | None:
    if costs.cell is None:
        return None
    from schedc.plan.price_cells import price_cells

    return price_cells(dependencies, costs)
