"""The best plans that a search has seen: plans that differ in nothing with an effect are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import inf

from schedc.planner.search.result import FoundPlan
from schedc.planner.space.axes import PlanAxes

_ALIKE = 1e-12
"""Steps and bytes that differ by less, relatively, are equal."""


class Answer:
    """The best plans, at most ``top`` of them; each with the plans that are the same in other words.

    by_memory: the best are those that hold least, not the fastest.
    """

    def __init__(self, top: int, by_memory: bool = False) -> None:
        self.top, self.by_memory = top, by_memory
        self._alike: dict[tuple[str, str, bytes], list[FoundPlan]] = {}
        self._value: dict[tuple[str, str, bytes], float] = {}

    @property
    def full(self) -> bool:
        return len(self._alike) >= self.top

    @property
    def last(self) -> float:
        """The value of the last plan; infinite where there is none."""
        return max(self._value.values(), default=inf)

    @property
    def values(self) -> tuple[float, ...]:
        """What decides of its plans: seconds, or bytes."""
        return tuple(self._value.values())

    def __bool__(self) -> bool:
        return bool(self._alike)

    @property
    def smallest(self) -> float:
        """Bytes of the plan that holds least; infinite where there is none."""
        return min((alike[0].peak_bytes for alike in self._alike.values()), default=inf)

    def takes(self, step: float, memory: float) -> bool:
        """Whether a plan of so many seconds and bytes, or more, may be one of the best."""
        return not self.full or (memory if self.by_memory else step) <= self.last * (1 + _ALIKE)

    def add(self, plan: FoundPlan) -> None:
        """Takes an exact plan, if it is one of the best."""
        key, value = plan.key(), plan.peak_bytes if self.by_memory else plan.step_s
        if key in self._alike:
            if all(each.axes != plan.axes for each in self._alike[key]):
                self._alike[key].append(plan)
            return
        self._alike[key], self._value[key] = [plan], value
        if len(self._alike) > self.top:
            worst = max(self._value, key=self._value.__getitem__)
            del self._alike[worst], self._value[worst]

    def plans(self) -> Iterator[FoundPlan]:
        """The plans, best first, with the axes that have no effect in them; of equal ones, a fixed order is named."""
        for key in sorted(self._alike, key=lambda key: (self._value[key], key)):
            alike = sorted(self._alike[key], key=lambda plan: (plan.planned.choice.by_policy, plan.axes))
            yield replace(alike[0], free=free_axes([plan.axes for plan in alike]))


class Front(Answer):
    """The plans than which none found has a shorter step and less memory, or as much of one and less of the other."""

    def __init__(self) -> None:
        super().__init__(top=0)

    @property
    def full(self) -> bool:
        return False

    def takes(self, step: float, memory: float) -> bool:
        return all(step < each.step_s or memory < each.peak_bytes for (each, *_) in self._alike.values())

    def add(self, plan: FoundPlan) -> None:
        key = plan.key()
        if key in self._alike:
            super().add(plan)
        elif self.takes(plan.step_s, plan.peak_bytes):
            for other, (each, *_) in list(self._alike.items()):
                if plan.step_s <= each.step_s and plan.peak_bytes <= each.peak_bytes:
                    del self._alike[other], self._value[other]
            self._alike[key], self._value[key] = [plan], plan.step_s


def free_axes(alike: Sequence[PlanAxes]) -> dict[str, tuple[str, ...]]:
    """The axes in which equal plans differ, with the values of the others than the first."""
    free = {}
    for axis in fields(PlanAxes):
        values = [str(getattr(axes, axis.name)) for axes in alike]
        if others := tuple(dict.fromkeys(value for value in values if value != values[0])):
            free[axis.name] = others
    return free


def pareto_front(plans: Sequence[FoundPlan]) -> tuple[FoundPlan, ...]:
    """The plans than which no other is as fast and as small, fastest first."""
    front: list[FoundPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.peak_bytes, plan.axes)):
        if not front or plan.peak_bytes < front[-1].peak_bytes:
            front.append(plan)
    return tuple(front)
