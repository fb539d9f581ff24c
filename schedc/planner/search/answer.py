"""The best plans that a search has seen: plans that differ in nothing with an effect are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf

from schedc.planner.price.files import PlannedStep
from schedc.planner.price.priced import PricedPlan
from schedc.planner.search.result import ParetoPoint
from schedc.planner.space.axes import PlanAxes


@dataclass(frozen=True, eq=False)
class ExactPlan:
    """A plan with its exact step and bytes. digest: of its order.

    floor: seconds that bounded it before. priced: what the compiler says, where it was asked.
    """

    planned: PlannedStep
    step: float
    peak: float
    digest: bytes
    floor: float
    priced: PricedPlan | None = None

    @property
    def axes(self) -> PlanAxes:
        return self.planned.axes

    def key(self) -> tuple[str, str, bytes]:
        """Equal for plans that differ in nothing that has an effect."""
        return f"{self.step:.11e}", f"{self.peak:.11e}", self.digest


class Answer:
    """The best plans, at most ``top`` of them; each with the plans that are the same in other words."""

    def __init__(self, top: int) -> None:
        self.top = top
        self._alike: dict[tuple[str, str, bytes], list[ExactPlan]] = {}
        self._value: dict[tuple[str, str, bytes], float] = {}

    @property
    def full(self) -> bool:
        return len(self._alike) >= self.top

    @property
    def last(self) -> float:
        """The value of the last plan; infinite where there is none."""
        return max(self._value.values(), default=inf)

    def __bool__(self) -> bool:
        return bool(self._alike)

    def add(self, exact: ExactPlan, value: float) -> None:
        """Takes a plan, if it is one of the best. value: what plans are compared by."""
        key = exact.key()
        if key in self._alike:
            if all(each.axes != exact.axes for each in self._alike[key]):
                self._alike[key].append(exact)
            return
        self._alike[key], self._value[key] = [exact], value
        if len(self._alike) > self.top:
            worst = max(self._value, key=self._value.__getitem__)
            del self._alike[worst], self._value[worst]

    def plans(self) -> Iterator[tuple[ExactPlan, dict[str, tuple[str, ...]]]]:
        """The plans, best first, with the axes that have no effect in them; of equal ones, a fixed order is named."""
        for key in sorted(self._alike, key=lambda key: (self._value[key], key)):
            alike = sorted(self._alike[key], key=lambda exact: (exact.planned.choice.by_policy, exact.axes))
            yield alike[0], free_axes([exact.axes for exact in alike])


def free_axes(alike: Sequence[PlanAxes]) -> dict[str, tuple[str, ...]]:
    """The axes in which equal plans differ, with the values of the others than the first."""
    free = {}
    for axis in fields(PlanAxes):
        values = [str(getattr(axes, axis.name)) for axes in alike]
        if others := tuple(dict.fromkeys(value for value in values if value != values[0])):
            free[axis.name] = others
    return free


def pareto_front(plans: Sequence[ExactPlan]) -> tuple[ParetoPoint, ...]:
    """The plans than which no other is as fast and as small, fastest first."""
    front: list[ParetoPoint] = []
    for exact in sorted(plans, key=lambda exact: (exact.step, exact.peak, exact.axes)):
        if not front or exact.peak < front[-1].bytes:
            front.append(ParetoPoint(exact.step, exact.peak, exact.axes))
    return tuple(front)
