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


_ALIKE = 1e-12
"""Steps and bytes that differ by less, relatively, are equal."""


class Answer:
    """The best plans, at most ``top`` of them; each with the plans that are the same in other words.

    by_memory: the best are those that hold least, not the fastest.
    """

    def __init__(self, top: int, by_memory: bool = False) -> None:
        self.top, self.by_memory = top, by_memory
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

    @property
    def smallest(self) -> float:
        """Bytes of the plan that holds least; infinite where there is none."""
        return min((alike[0].peak for alike in self._alike.values()), default=inf)

    def takes(self, step: float, memory: float) -> bool:
        """Whether a plan of so many seconds and bytes, or more, may be one of the best."""
        return not self.full or (memory if self.by_memory else step) <= self.last * (1 + _ALIKE)

    def add(self, exact: ExactPlan) -> None:
        """Takes a plan, if it is one of the best."""
        key, value = exact.key(), exact.peak if self.by_memory else exact.step
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


class Front(Answer):
    """The plans than which none found has a shorter step and less memory, or as much of one and less of the other."""

    def __init__(self) -> None:
        super().__init__(top=0)

    @property
    def full(self) -> bool:
        return False

    def takes(self, step: float, memory: float) -> bool:
        return all(step < each.step or memory < each.peak for (each, *_) in self._alike.values())

    def add(self, exact: ExactPlan) -> None:
        key = exact.key()
        if key in self._alike:
            super().add(exact)
        elif self.takes(exact.step, exact.peak):
            for other, (each, *_) in list(self._alike.items()):
                if exact.step <= each.step and exact.peak <= each.peak:
                    del self._alike[other], self._value[other]
            self._alike[key], self._value[key] = [exact], exact.step


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
