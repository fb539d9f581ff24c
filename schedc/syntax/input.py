"""What a command takes: the tree of a schedule, a plan with its schedule, or an order that was made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from schedc.diagnostics import Diagnostic, Label, RequestError
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.source import NOWHERE, Source
from schedc.syntax.plan import PlanTree
from schedc.syntax.tree import Claim, ScheduleTree, SizeParameter
from schedc.units import equations


@dataclass(frozen=True)
class AppliedPlan:
    """A plan and the checked schedule that it applies, whose sizes have the plan's values as defaults.

    name, doc: of the plan; without a doc of its own, the schedule's. Parameters, claims and source are the schedule's.
    slices: slices of a microbatch, in place of the plan's own lines; None where these count.
    """

    name: str
    doc: str
    tree: PlanTree
    schedule: ScheduleTree
    slices: int | None = None

    @property
    def source(self) -> Source:
        return self.schedule.source

    @property
    def parameters(self) -> tuple[SizeParameter, ...]:
        return self.schedule.parameters

    @property
    def claims(self) -> tuple[Claim, ...]:
        return self.schedule.claims


@dataclass(frozen=True)
class Order:
    """A schedule made elsewhere: an order at a single size, without claims.

    Commands read it like a `ScheduleTree`. The parameters are the sizes. posted: its messages as the file posts them;
    None where the file has none.
    """

    schedule: Schedule
    posted: Program | None = None
    claims: tuple[Claim, ...] = ()
    slices: int | None = None

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def doc(self) -> str:
        return self.schedule.doc

    @property
    def source(self) -> Source | None:
        return self.schedule.source

    @property
    def parameters(self) -> tuple[SizeParameter, ...]:
        roles = {"P": "ranks", "M": "microbatches"}
        return tuple(SizeParameter(n, roles.get(n, "count"), v, NOWHERE) for n, v in self.schedule.sizes.items())

    def at(self, sizes: Mapping[str, int]) -> Schedule:
        """The schedule. Raises `DiagnosticError` (S606) for sizes that it is not an order for."""
        own = self.schedule.sizes
        wrong = {name: value for name, value in sizes.items() if own.get(name) != value}
        if not wrong:
            return self.schedule
        message = f"{equations(wrong)} was asked for, but this order is one for {equations(own)}"
        help = "leave -D out; a .sched file describes a schedule at every size"
        raise RequestError([Diagnostic("S606", message, Label(NOWHERE), help=help, source=self.source)])


Input: TypeAlias = ScheduleTree | AppliedPlan | Order
