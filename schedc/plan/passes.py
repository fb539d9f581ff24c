"""A training step is one value, and a list of passes fills it: from a schedule, or from choices made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from schedc.units import equations

if TYPE_CHECKING:
    from schedc.claims.check import ClaimResult
    from schedc.diagnostics import Diagnostic
    from schedc.ir.plan import Plan
    from schedc.ir.program import Program
    from schedc.ir.schedule import Schedule
    from schedc.plan.candidates import ChosenBalance, ChosenSlices
    from schedc.plan.directives.base import Directives
    from schedc.plan.held_memory import HeldMemory
    from schedc.plan.layout.costs import LayerCosts
    from schedc.plan.layout.parts import Layout
    from schedc.plan.level_mixes import ChosenLevels
    from schedc.plan.place_works import Offloading
    from schedc.plan.replicate import Replication
    from schedc.step.cells.cell_pricing import CellPricing
    from schedc.step.costs.costs import Costs
    from schedc.step.dependencies import Dependencies
    from schedc.step.memory import Memory, RankBytes
    from schedc.step.program.queues import ChosenCommunicators
    from schedc.step.timeline import CellTimes, Timeline
    from schedc.step.work_runs import WorkRuns
    from schedc.syntax.input import Input

_LATER: Any = None
"""The value of a field that no pass has given yet."""


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A step of a schedule or a plan, at one size under one set of costs. `lower` gives the fields behind ``done``.

    tree: what was opened; None for a step whose order is given. sizes: values of size parameters. given: the costs as
    given; for a plan, those of one layer. replicas: of every rank, whose sums and gathers are placed; None places none.
    done: names of the passes that have run.
    """

    tree: Input | None
    sizes: Mapping[str, int]
    given: Costs
    replicas: int | None = None
    done: frozenset[str] = frozenset()
    lines: Directives = _LATER
    """The lines of the plan, read and checked."""
    dependencies: Dependencies = _LATER
    """The order of the cells of all ranks, and what each cell waits for."""
    layout: Layout = _LATER
    """The parts of the model that each stage holds."""
    plan: Plan = _LATER
    """What the plan attaches, with every choice made."""
    layers: LayerCosts = _LATER
    """What layers take and hold, as the plan says."""
    costs: Costs = _LATER
    """The costs of the stages."""
    balanced: ChosenBalance | None = None
    """How experts are copied, and the other ways; None where the plan says it."""
    sliced: ChosenSlices | None = None
    """The slices that the compiler chose; None where the plan leaves none to it."""
    chosen: ChosenLevels | None = None
    """The levels that the compiler chose; None where the plan leaves none to it."""
    written: Dependencies | None = None
    """The order before the compiler placed Rs for a plan; None where it placed none."""
    held: HeldMemory = _LATER
    """What ranks hold without works."""
    offloading: Offloading | None = None
    """What a plan moves to host memory and back, with its lanes; None for a plan that moves nothing."""
    bytes: RankBytes | None = None
    """The bytes of ranks; None where a plan has no memory in bytes."""
    replication: Replication | None = None
    """What replicas sum and gather; None where no number of replicas is given."""
    timeline: Timeline = _LATER
    """When each cell runs."""
    predicted: Timeline = _LATER
    """When each cell runs, from inside cells where the costs have a table of cells."""
    unplaced: Timeline | None = None
    """The timeline without the Rs that the compiler placed for a plan; None where it placed none.

    Backwards then recompute inside themselves.
    """
    memory: Memory = _LATER
    """The memory of the device: without what works have moved to the host."""
    losses: Mapping[str, Costs] | None = None
    """The costs of the stages by the form of the loss; None where the plan says no form, or other things decide too."""
    inside: CellPricing | None = None
    """The schedule priced by what happens inside its cells; None where the costs have no table of cells."""
    claims: tuple[ClaimResult, ...] = ()
    """The verdict on each claim of the schedule."""
    instructions: Program = _LATER
    """The instruction streams, with the works."""
    communicators: ChosenCommunicators | None = _LATER
    """The communicators of the messages, and what one would cost; None where one costs nothing, as messages do."""

    def __repr__(self) -> str:
        if self.timeline is None:
            return f"<Step of {self.tree.name if self.tree else 'an order'}, not priced>"
        figures = f"makespan {self.timeline.makespan:g}, bubble ratio {self.timeline.bubble_ratio:.4f}"
        return f"<Step {self.schedule.name} ({equations(self.schedule.sizes)}): {figures}>"

    @property
    def schedule(self) -> Schedule:
        return self.dependencies.schedule

    @property
    def works(self) -> WorkRuns | None:
        """The works at their times; None for a step without works."""
        return None if self.placed is None else self.placed.runs(self.dependencies)

    @property
    def placed(self) -> Offloading | Replication | None:
        """The works at their places: those among replicas, with offloads beside them, or offloads alone."""
        return self.offloading if self.replication is None else self.replication

    @property
    def cell_times(self) -> CellTimes | None:
        """When cells run without works, from inside where the costs have a table of cells; None where nobody asked."""
        if self.inside is not None:
            return self.inside.closed
        return None if self.placed is None else self.placed.cells

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings of a legal schedule, about claims that fail."""
        return tuple(claim.diagnostic for claim in self.claims if claim.diagnostic is not None)

    def program(self) -> Program:
        """The instruction streams, with the works."""
        return lower(self, "instructions").instructions

    @property
    def itself(self) -> Step:
        """The step so far, for a pass that prices other steps like it."""
        return self

    def with_plan(self, plan: Plan) -> Step:
        """The same order under a plan whose levels are chosen."""
        return replace(self, plan=plan, done=self.done | {"levels"})

    def under(self, costs: Costs) -> Step:
        """The same order and works under other costs of the stages. Raises `DiagnosticError` (S404)."""
        return replace(
            self,
            costs=costs,
            offloading=self.offloading and self.offloading.under(self.dependencies, costs),
            replication=self.replication and self.replication.under(self.dependencies, costs),
        )


class Pass(NamedTuple):
    """A pass over a step.

    A dot reaches into a field: ``dependencies.schedule``. needs: fields that the function takes. gives: fields that it
    returns. run: "room.file:function", imported when it runs. when: fields that must be true, or false behind a "!".
    after: fields that must be set first. The function does not take them.
    """

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    run: str
    when: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def asked(self, step: Step) -> bool:
        """Whether the step asks for this pass."""
        return all(bool(_value(step, name.removeprefix("!"))) != name.startswith("!") for name in self.when)


_PLACED = ("offloading", "replication")

PASSES = (
    Pass("read", ("tree",), ("lines",), "plan.read:checked_lines", ("tree.tree",)),
    Pass("order", ("tree", "sizes", "given"), ("dependencies",), "plan.order:order", after=("lines",)),
    Pass(
        "refuse replicas", ("dependencies.schedule", "replicas"), ("replication",), "plan.replicate:refuse_unplanned",
        ("replicas", "!lines"),
    ),
    Pass("given", ("given", "dependencies.schedule", "lines"), ("costs",), "step.costs.given:given_costs"),
    Pass(
        "slices", ("dependencies", "tree.slices"), ("dependencies",), "plan.in_slices:in_slices",
        ("tree.slices", "!lines"), after=("costs",),
    ),
    Pass(
        "layout", ("lines", "dependencies.schedule", "given"), ("layout",), "plan.apply:place_layers", ("lines",),
        after=("costs",),
    ),
    Pass("attach", ("lines", "dependencies.schedule", "layout"), ("plan",), "plan.resolve:resolve", ("lines",)),
    Pass(
        "balance", ("itself",), ("plan", "balanced"), "plan.choose_balance:choose_balance", ("plan.balance.automatic",),
        after=("lines", "layout", "plan"),
    ),
    Pass(
        "choose slices", ("itself",), ("plan", "sliced"), "plan.choose_slices:choose_slices", ("lines.chooses_slices",),
        after=("lines", "layout", "plan", "dependencies"),
    ),
    Pass(
        "reorder", ("tree", "sizes", "given", "lines", "layout", "plan"), ("dependencies",), "plan.reorder:reorder",
        ("lines", "tree.schedule.has_policy"),
    ),
    Pass("layers", ("lines",), ("layers",), "plan.apply:layer_costs", ("lines",)),
    Pass(
        "levels", ("itself",), ("plan", "chosen"), "plan.choose_levels:choose_levels", ("lines.automatic",),
        after=("lines", "layout", "layers", "plan", "dependencies"),
    ),
    Pass("stages", ("lines", "layout", "given", "plan"), ("costs",), "plan.apply:stage_costs", ("lines",)),
    Pass(
        "recompute", ("tree", "plan", "layout", "costs", "dependencies"), ("dependencies", "costs", "written"),
        "plan.attached:place", ("lines",),
    ),
    Pass(
        "hold", ("lines", "plan", "layout", "layers", "dependencies.schedule", "costs"), ("held",),
        "plan.held_memory:held_memory", ("lines",),
    ),
    Pass(
        "offload", ("lines", "dependencies", "held"), ("offloading",), "plan.place_works:place_offloads",
        ("plan.offload",),
    ),
    Pass(
        "fit", ("lines.tree", "held", "dependencies", "offloading.placed"), ("bytes",),
        "plan.peak_memory:check_memory", ("lines", "!replicas"),
    ),
    Pass(
        "host", ("lines", "offloading", "dependencies", "bytes"), ("bytes",), "plan.place_works:check_host",
        ("offloading",),
    ),
    Pass(
        "replicate", ("lines", "held", "dependencies", "offloading", "replicas"), ("replication", "bytes"),
        "plan.replicate:replicate", ("lines", "replicas"),
    ),
    Pass(
        "times", ("dependencies.schedule", "costs", "dependencies"), ("timeline",), "step.timeline:simulate",
        ("!placed",), after=("bytes", *_PLACED),
    ),
    Pass(
        "times of works", ("works", "costs"), ("timeline",), "step.work_runs:timeline_of", ("placed",),
        after=("bytes", *_PLACED),
    ),
    Pass("predict", ("dependencies", "costs", "timeline"), ("predicted",), "plan.price_cells:predicted"),
    Pass(
        "times unplaced", ("written.schedule", "costs", "written"), ("unplaced",), "step.timeline:simulate",
        ("written",),
    ),
    Pass("memory", ("dependencies", "costs", "placed", "bytes"), ("memory",), "step.memory:memory_of", after=_PLACED),
    Pass(
        "losses", ("lines", "layout", "given", "plan"), ("losses",), "plan.apply:costs_by_loss",
        ("plan.loss", "!given.cell", "!written", "!offloading"), after=("written", "offloading"),
    ),
    Pass(
        "inside", ("dependencies", "costs", "placed"), ("inside",), "plan.price_cells:price_cells", ("costs.cell",),
        after=_PLACED,
    ),
    Pass(
        "claims", ("tree", "sizes", "costs", "dependencies", "written", "memory", "placed"), ("claims",),
        "claims.check:verdicts", after=_PLACED,
    ),
    Pass(
        "communicate", ("dependencies.schedule", "costs", "dependencies", "cell_times"), ("instructions",),
        "step.program.insert_communication:insert_communication", after=("bytes", "inside", *_PLACED),
    ),
    Pass(
        "insert works",
        ("instructions", "dependencies", "placed.placed", "placed.time", "costs", "cell_times.duration"),
        ("instructions",), "step.program.insert_works:insert_works", ("placed",),
    ),
    Pass(
        "queues", ("instructions", "costs", "tree.posted", "placed.time", "cell_times.duration"), ("communicators",),
        "step.program.queues:queued_messages",
    ),
)  # fmt: skip
"""The passes in the order in which they run."""

PRICED = ("costs", "bytes", "replication")
"""A legal step: order, costs of stages, bytes of ranks, works."""


def lower(step: Step, *wanted: str) -> Step:
    """The step with the fields ``wanted``: runs the passes behind them, in order, but for those that are done.

    Raises `DiagnosticError` as the passes do.
    """
    for each in _behind(wanted):
        if each.name in step.done or not each.asked(step):
            continue
        file, _, function = each.run.partition(":")
        given = getattr(import_module(f"schedc.{file}"), function)(*(_value(step, need) for need in each.needs))
        values = (given,) if len(each.gives) == 1 else given
        step = replace(step, done=step.done | {each.name}, **dict(zip(each.gives, values, strict=True)))
    return step


def _value(step: Step, need: str) -> Any:
    """The value of a field; None behind a field that is None, and for what an order or a schedule lacks of a plan."""
    value: Any = step
    for name in need.split("."):
        value = getattr(value, name, None)
    return value


@lru_cache(maxsize=64)
def _behind(wanted: tuple[str, ...]) -> tuple[Pass, ...]:
    """The passes behind the fields ``wanted``."""
    missing, chosen = set(wanted), list[Pass]()
    for each in reversed(PASSES):
        if missing & set(each.gives):
            missing |= {need.partition(".")[0] for need in each.needs} | set(each.after)
            chosen.append(each)
    return tuple(reversed(chosen))
