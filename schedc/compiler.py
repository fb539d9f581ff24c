"""The public entry of the compiler: from a schedule's name or file to its Program, or to its analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedc.claims.check import ClaimResult, check_claims
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.fastest import has_policy
from schedc.inputs import Input, Order, open_input
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.load.frozen import thaw
from schedc.load.library import AppliedPlan, Given
from schedc.step.costs.costs import Costs
from schedc.step.costs.given import check_given
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_dependencies
from schedc.step.memory import Memory, RankBytes, measure_memory, without
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import Timeline, simulate
from schedc.syntax.tree import ScheduleTree

if TYPE_CHECKING:
    from schedc.ir.plan import Plan
    from schedc.layout.parts import Layout
    from schedc.plan.attached import AttachedPlan
    from schedc.plan.choose_recomputation import ChosenRecomputation
    from schedc.plan.place_works import Offloading
    from schedc.plan.read import ReadPlan
    from schedc.plan.replicate import Replication
    from schedc.step.cells.cell_pricing import CellPricing
    from schedc.step.lane_walk import TimedWorks
    from schedc.step.op_times import Pricer
    from schedc.step.work_runs import WorkRuns


@dataclass(frozen=True)
class Analysis:
    """A legal schedule at one size under one set of costs, measured.

    tree: what was opened. costs: those of the stages. claims: the verdict on each claim of the schedule.
    """

    tree: Input
    schedule: Schedule
    costs: Costs
    dependencies: Dependencies
    timeline: Timeline
    memory: Memory
    claims: tuple[ClaimResult, ...]
    inside: CellPricing | None = None
    """The schedule priced by what happens inside its cells; None where the costs have no table of cells."""
    offloading: Offloading | None = None
    """What a plan moves to host memory and back, with its lanes; None for a plan that moves nothing."""
    chosen: ChosenRecomputation | None = None
    """The levels that the compiler chose; None where the plan leaves none to it."""
    unplaced: Timeline | None = None
    """The timeline without the Rs that the compiler placed for a plan; None where it placed none.

    Backwards then recompute inside themselves.
    """
    losses: Mapping[str, Costs] | None = None
    """The costs of the stages by the form of the loss; None where the plan says no form, or other things decide too."""
    replication: Replication | None = None
    """What replicas sum and gather; None where no number of replicas is given."""

    @property
    def works(self) -> WorkRuns | None:
        """The works at their times; None for a step without works."""
        of_replicas = self.replication
        source = of_replicas if of_replicas is not None else self.offloading
        return None if source is None else source.runs(self.dependencies)

    def program(self) -> Program:
        """The instruction streams, with the works."""
        return Priced(self.dependencies, self.costs, offloading=self.offloading, replication=self.replication).program()

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings of a legal schedule: one for each claim that does not hold."""
        return tuple(claim.diagnostic for claim in self.claims if claim.diagnostic is not None)


def compile(source: Given, *, costs: Costs | None = None, **sizes: int) -> Program:
    """Compile a schedule to one instruction stream per rank.

    source: the name of a library schedule (``"dualpipev"``), the path of a ``.sched`` file, a torch schedule CSV or a
        text form, or a `schedc.load.library.Text`. ``"file.sched:name"`` is one of several schedules, or a plan.
    costs: times that order the messages; for a plan, those of one layer. The order of compute depends on them only
        where the file says `policy`. Default: unit costs.
    sizes: values of the schedule's size parameters (``P=4, M=16``); the others take their defaults.

    The schedule is checked for completeness, order and deadlock. Claims are not checked here; `analyse` and
    ``schedc check`` do that. Raises `DiagnosticError` with every finding.
    """
    return compile_at(source, sizes, costs)


def compile_at(
    source: Given, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None
) -> Program:
    """`compile` with the sizes as a mapping, so that they may have any name.

    replicas: their number, for a program with their sums and gathers; None leaves these to the pipeline.
    """
    return price(open_input(source), sizes, costs, replicas).program()


def legal_schedule(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> Schedule:
    """Elaborates and verifies a schedule. Raises `DiagnosticError` if its order is incomplete, illegal or deadlocks.

    costs: times that a `policy` orders by, unless its order is frozen; for a plan, those of one layer (see `priced`).
    Default: unit costs.
    """
    return price(tree, sizes, costs).schedule


def priced(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> tuple[Schedule, Costs]:
    """`legal_schedule` with the costs of its stages: for a plan those of its layers, else ``costs``.

    A plan does not change the order of its schedule, unless a `policy` orders by the costs of the plan's stages.
    """
    result = price(tree, sizes, costs)
    return result.schedule, result.costs


@dataclass(frozen=True, eq=False)
class Priced:
    """The dependencies of a legal schedule, and the costs of its stages.

    written: dependencies before the compiler placed Rs for a plan; None where it placed none. offloading: the works
    that it placed for a plan. chosen: the levels that the compiler chose.
    """

    dependencies: Dependencies
    costs: Costs
    written: Dependencies | None = None
    offloading: Offloading | None = None
    chosen: ChosenRecomputation | None = None
    losses: Mapping[str, Costs] | None = None
    """The costs by the form of the loss, where the plan says one."""
    replication: Replication | None = None
    """The works among replicas beside those of offloads, where a number of replicas is given."""
    held: RankBytes | None = None
    """The bytes of ranks; None where a plan has no memory in bytes."""

    @property
    def schedule(self) -> Schedule:
        return self.dependencies.schedule

    @property
    def works(self) -> WorkRuns | None:
        """The works at their times; None without any."""
        of_replicas = self.replication
        source = of_replicas if of_replicas is not None else self.offloading
        return None if source is None else source.runs(self.dependencies)

    def timeline(self) -> Timeline:
        """The timeline of the step, with its works."""
        if self.works is None:
            return simulate(self.schedule, self.costs, self.dependencies)
        return self.works.timeline(float(self.costs.p2p))

    def under(self, costs: Costs) -> Priced:
        """The same order and works under other costs of the stages. Raises `DiagnosticError` (S404)."""
        dependencies = self.dependencies
        return replace(
            self,
            costs=costs,
            offloading=self.offloading and self.offloading.under(dependencies, costs),
            replication=self.replication and self.replication.under(dependencies, costs),
        )

    def memory(self) -> Memory:
        """The memory of the device: without what works have moved to the host."""
        memory = measure_memory(self.schedule, self.costs, self.dependencies)
        memory = memory if self.works is None else without(memory, self.works.placed)
        return replace(memory, held=self.held)

    def program(self) -> Program:
        """The instruction streams, with the works."""
        source = self.offloading if self.replication is None else self.replication
        times = None if source is None else source.cells
        program = insert_communication(self.schedule, self.costs, self.dependencies, times)
        if source is None:
            return program
        from schedc.step.program.insert_works import insert_works

        return insert_works(program, self.dependencies, source.placed)


def price(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None) -> Priced:
    """A legal schedule with the costs of its stages, and with the works that a plan asks for.

    sizes, costs: as for `priced`. replicas: of every rank, whose sums and gathers are priced; None: they are not.
    Raises `DiagnosticError` as `legal_schedule` does, and S410 for replicas of what has no parameters.
    """
    costs = costs or Costs()
    if isinstance(tree, AppliedPlan):
        planned = _planned(tree, sizes, costs, checked=replicas is None)
        return planned if replicas is None else _replicated(tree, planned, replicas)
    slices = 1 if isinstance(tree, Order) else tree.slices
    dependencies = _legal(tree, sizes, costs, order_pricer(costs, slices))
    if replicas is not None:
        from schedc.plan.replicate import unplanned

        raise unplanned(dependencies.schedule, replicas)
    check_given(costs, dependencies.schedule)
    if slices > 1:
        from schedc.plan.in_slices import with_slices

        dependencies = replace(dependencies, schedule=with_slices(dependencies.schedule, slices))
    return Priced(dependencies, costs)


def _replicated(tree: ReadPlan, planned: Priced, replicas: int) -> Priced:
    from schedc.plan.apply import layer_costs, layout_of_plan
    from schedc.plan.replicate import replicate

    dependencies, plan = planned.dependencies, planned.schedule.plan
    layout, layers = layout_of_plan(tree.tree, planned.schedule), layer_costs(tree.directives)
    replication = replicate(
        tree.directives, plan, layout, layers, dependencies, planned.costs, planned.offloading, replicas
    )
    return replace(planned, replication=replication, held=replication.held)


def _planned(tree: ReadPlan, sizes: Mapping[str, int], costs: Costs, checked: bool = True) -> Priced:
    """checked: whether the memory of the plan is checked here, without works among replicas."""
    # Layouts are imported where they are used: most runs have none, and start faster without them.
    from schedc.plan.apply import layer_costs, place_layers, stage_costs
    from schedc.plan.attached import AttachedPlan
    from schedc.plan.cell_pricer import pricer_of
    from schedc.plan.directives.offload import is_chosen
    from schedc.plan.directives.recompute import auto_stages
    from schedc.plan.held_memory import held_memory
    from schedc.plan.peak_memory import check_memory
    from schedc.plan.resolve import resolve

    dependencies = _legal(tree.schedule, sizes, replace(costs, parts=None))
    if costs.parts is None:
        check_given(costs, dependencies.schedule)
    layout = place_layers(tree.directives, dependencies.schedule, costs)
    plan = resolve(tree.directives, dependencies.schedule, layout)
    of_stages = stage_costs(tree.directives, layout, costs, plan)
    attached = AttachedPlan(tree.name, tree.doc, plan, layout, replace(of_stages, cell=costs.cell))
    if has_policy(tree.schedule):
        dependencies = _legal(tree.schedule, sizes, of_stages, pricer_of(costs, attached))
    chosen = None
    stages = auto_stages(tree.directives, dependencies.schedule)
    if stages and is_chosen(plan):
        return _chosen_together(tree, layout, costs, plan, dependencies, stages, attached)
    if stages:
        from schedc.plan.choose_recomputation import choose_recomputation

        chosen = choose_recomputation(tree.directives, layout, costs, plan, dependencies, stages)
        plan = chosen.plan
        of_stages = stage_costs(tree.directives, layout, costs, plan)
        attached = replace(attached, plan=plan, costs=replace(of_stages, cell=costs.cell))
    dependencies, of_stages, written = attached.placed(dependencies)
    layers = layer_costs(tree.directives)
    held = held_memory(tree.directives, plan, layout, layers, dependencies.schedule, of_stages)
    if not plan.offload:
        peaks = check_memory(tree.tree, plan, held, dependencies) if checked else None
        losses = None if written else _by_loss(tree, layout, costs, plan)
        return Priced(dependencies, of_stages, written, chosen=chosen, losses=losses, held=peaks)
    from schedc.plan.place_works import check_host, place_offloads

    offloading = place_offloads(tree.directives, plan, layout, layers, dependencies, held)
    peaks = check_memory(tree.tree, plan, held, dependencies, offloading.placed) if checked else None
    check_host(tree.directives, offloading.placed, dependencies)
    return Priced(dependencies, of_stages, written, offloading, chosen, held=peaks)


def _by_loss(tree: ReadPlan, layout: Layout, costs: Costs, plan: Plan) -> dict[str, Costs] | None:
    """The costs of the stages by the form of the loss; None where the plan says none, or cells are priced."""
    from schedc.ir.plan import LOSS_FORMS
    from schedc.plan.apply import stage_costs

    if (loss := plan.loss) is None or costs.cell is not None:
        return None
    forms = {form: replace(plan, loss=replace(loss, form=form)) for form in LOSS_FORMS}
    return {form: stage_costs(tree.directives, layout, costs, each) for form, each in forms.items()}


def _chosen_together(
    tree: ReadPlan,
    layout: Layout,
    costs: Costs,
    plan: Plan,
    dependencies: Dependencies,
    stages: Sequence[int],
    attached: AttachedPlan,
) -> Priced:
    """What the compiler chooses under both `recompute auto` and `offload auto`."""
    from schedc.plan.apply import stage_costs
    from schedc.plan.choose_both import choose_both
    from schedc.plan.peak_memory import check_memory
    from schedc.plan.place_works import check_host

    def attach(plan: Plan) -> tuple[Dependencies, Costs, Dependencies | None]:
        of_stages = stage_costs(tree.directives, layout, costs, plan)
        return replace(attached, plan=plan, costs=replace(of_stages, cell=costs.cell)).placed(dependencies)

    both = choose_both(tree.directives, layout, costs, plan, dependencies, stages, attach)
    placed = both.offloading.placed
    check_host(tree.directives, placed, both.dependencies)
    peaks = check_memory(tree.tree, both.recomputation.plan, both.held, both.dependencies, placed)
    return Priced(both.dependencies, both.costs, both.written, both.offloading, both.recomputation, held=peaks)


def order_pricer(costs: Costs, slices: int = 1) -> Pricer | None:
    """What orders a policy by more than the costs of ops: the table of cells of ``costs``; None without a table.

    slices: number of slices of a microbatch.
    """
    if costs.cell is None:
        return None
    from schedc.plan.cell_pricer import pricer_of

    return pricer_of(costs, slices=slices)


def _legal(
    tree: ScheduleTree | Order, sizes: Mapping[str, int], costs: Costs, pricer: Pricer | None = None
) -> Dependencies:
    """The dependencies of a legal schedule, as the check for deadlocks computed them."""
    if isinstance(tree, Order):
        return Dependencies.of(tree.at(sizes))  # judged when it was read
    if (frozen := thaw(tree, sizes)) is not None:
        return Dependencies.of(frozen)
    dependencies, findings = check_dependencies(elaborate(tree, sizes, costs, pricer))
    if dependencies is None or findings:
        raise DiagnosticError(findings)
    return dependencies


def analyse(
    source: Given, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None
) -> Analysis:
    """Checks a schedule and measures its timeline, memory and claims. Raises `DiagnosticError` if it is not legal.

    sizes, costs: as for `compile`; replicas: as for `price`.
    """
    tree = open_input(source)
    result = price(tree, sizes, costs, replicas)
    dependencies, costs = result.dependencies, result.costs
    written = dependencies if result.written is None else result.written
    schedule = dependencies.schedule
    memory = result.memory()
    claims = check_claims(
        tree.claims,
        written.schedule,
        costs,
        dependencies=written,
        memory=memory if written is dependencies and result.works is None else None,
        follows_costs=_follows_costs(tree, sizes),
    )
    return Analysis(
        tree,
        schedule,
        costs,
        dependencies,
        result.timeline(),
        memory,
        tuple(claims),
        _inside(dependencies, costs, result.offloading if result.replication is None else result.replication),
        result.offloading,
        result.chosen,
        None if result.written is None else simulate(written.schedule, costs, written),
        result.losses,
        result.replication,
    )


def _follows_costs(tree: Input, sizes: Mapping[str, int]) -> bool:
    """Whether the costs chose the order: by a `policy` whose order is not frozen."""
    if isinstance(tree, Order):
        return False
    schedule = tree.schedule if isinstance(tree, AppliedPlan) else tree
    return has_policy(schedule) and thaw(schedule, sizes) is None


def _inside(dependencies: Dependencies, costs: Costs, works: TimedWorks | None) -> CellPricing | None:
    if costs.cell is None:
        return None
    from schedc.plan.price_cells import price_cells

    return price_cells(dependencies, costs, works)
