"""What plans of a space have, and what the space leaves out: a table of its axes, from the laws that leave values out.

Values leave in an order: laws of an axis (`RULES`), laws of all outer axes (`PlanSpace.met`), schedules, laws of inner
axes (`INNER_LAWS`), and conditions. A value is left out by the first of them that no plan with it passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from schedc.ir.arrays import Bools
from schedc.model.parts import all_parts
from schedc.model.spread import RANK_ORDER
from schedc.planner.price.copies import COPYING
from schedc.planner.price.plan_lines import unused_lines
from schedc.planner.space.axes import OUTER_AXES, PlanAxes
from schedc.planner.space.blocks import InnerAxes, PlanBlock
from schedc.planner.space.space import INNER_LAWS, NO_SCHEDULE, OUTER, PlanSpace, inner_kind
from schedc.planner.times.problem import PlanProblem

Value: TypeAlias = Any
"""A number or a name of an axis; a level of recomputation with what it applies to."""

Pair: TypeAlias = tuple[str, Value]
"""An axis of plans and a value of it."""

LINE = "lines of plans"
"""What the table calls the lines that a plan may have, and no plan of a space has."""


class SpaceFact(NamedTuple):
    """Values of an axis that plans have (``why`` is empty), or that are left out for one reason.

    chosen: whether spaces leave them out by choice, and no model, cluster or condition asks for it.
    """

    axis: str
    values: tuple[Value, ...]
    why: str = ""
    chosen: bool = False

    @property
    def used(self) -> bool:
        return not self.why


def space_facts(space: PlanSpace, problem: PlanProblem) -> tuple[SpaceFact, ...]:
    """The table of a space, axis by axis: first what plans have, then what is left out."""
    facts = [*_axes(space), *_structure(problem), *_lines(problem)]
    order = list(dict.fromkeys(fact.axis for fact in facts))
    return tuple(sorted(facts, key=lambda fact: (order.index(fact.axis), not fact.used)))


def axis_ends(facts: Iterable[SpaceFact], axes: PlanAxes, free: Iterable[str]) -> Iterator[str]:
    """Where a plan has the last value that its space has of an axis, and a space could have the next one.

    free: axes without effect on the plan, which are not named.
    """
    facts = tuple(facts)
    for axis in (axis for axis in ENDING if axis not in free):
        own, rows = getattr(axes, axis), [fact for fact in facts if fact.axis == axis]
        values = sorted((value, fact.used, fact.chosen) for fact in rows for value in fact.values)
        place = values.index((own, True, False))
        if any(chosen for *_, chosen in values[place + 1 : place + 2]):
            yield f"{axis} {own} is the largest tried"
        elif any(chosen for *_, chosen in values[max(place - 1, 0) : place]):
            yield f"{axis} {own} is the smallest tried"


# Axes of plans.

ENDING = ("tp", "cp", "pp", "vpp", "ep", "microbatch", "zero")
"""The axes of numbers that a space chooses."""

_AXES = (*ENDING, "dp", "microbatches", "schedule", "limit", "overlap", "recompute", "layout", "alltoall")
_COLUMNS = {"orders": ("schedule", "limit", "overlap"), "levels": ("recompute",), "layouts": ("layout",)} | {
    "methods": ("alltoall",),
    "zeros": ("zero",),
}
"""By field of `InnerAxes`, the axes of plans that its values say."""


def _axes(space: PlanSpace) -> Iterator[SpaceFact]:
    """What plans have of each axis, and what each law leaves out."""
    offered = left = _offered(space)
    seen: Collection[Pair] = offered
    gone: dict[tuple[str, str], list[Value]] = {}
    for why, axes, seen in _passed(space):
        taken = [pair for pair in left if pair[0] in axes and pair not in seen]
        for axis, value in taken:
            gone.setdefault((axis, why), []).append(value)
        left = [pair for pair in left if pair not in taken]
    others = sorted(pair for pair in seen if pair not in offered)
    for name in _AXES:
        yield SpaceFact(name, tuple(value for axis, value in (*left, *others) if axis == name))
    for (axis, why), values in gone.items():
        yield SpaceFact(axis, tuple(values), why)
    for rule in space.values.left:
        yield SpaceFact(rule.axis, rule.values, rule.why, rule.chosen)
    for schedule in space.offered.left_out:
        yield SpaceFact("schedule", (schedule.schedule,), schedule.reason)


def _offered(space: PlanSpace) -> list[Pair]:
    """The values that laws may take."""
    values = space.values
    inner = {"levels": values.levels, "layouts": values.layouts, "methods": values.methods, "zeros": values.zero}
    return [
        *((name, value) for name in OUTER for value in getattr(values, name)),
        *((_COLUMNS[field][0], value) for field, each in inner.items() for value in each),
        *(("schedule", name) for name in space.offered.names),
        *(("overlap", value) for value in values.overlaps),
    ]


def _passed(space: PlanSpace) -> Iterator[tuple[str, Collection[str], set[Pair]]]:
    """Yields the text of each law, the axes that a law reads, and the values of these axes that pass."""
    for remaining in (*space.met, space.ordered):
        points = remaining.points
        yield (
            remaining.what,
            OUTER,
            {(name, int(value)) for name in OUTER for value in np.unique(space.grid[name][points])},
        )
    prefixes = tuple(space.prefixes())
    options = tuple(dict.fromkeys(order for prefix in prefixes for order in space.orders(*prefix.order_key)))
    yield NO_SCHEDULE, ("schedule", "overlap"), _pairs("orders", options)
    values = space.values
    left: dict[str, tuple[Any, ...]] = {"orders": options, "zeros": values.zero}
    left |= {"levels": values.levels, "layouts": values.layouts, "methods": values.methods}
    kinds = {inner_kind(prefix, space.model): prefix for prefix in prefixes}.values()
    for law in INNER_LAWS:
        left[law.axis] = tuple(
            value for value in left[law.axis] if any(law.keeps(value, each, space.model) for each in kinds)
        )
        yield law.says, _COLUMNS[law.axis], _pairs(law.axis, left[law.axis])
    yield from _conditions_passed(space)


def _conditions_passed(space: PlanSpace) -> Iterator[tuple[str, Collection[str], set[Pair]]]:
    """`_passed` for conditions on inner axes; at last the values of all legal plans."""
    conditions = space.inner_conditions
    outer = tuple(each for each in space.conditions if each not in conditions)
    seen: list[set[Pair]] = [set() for _ in (*conditions, None)]
    for block in replace(space, conditions=outer).blocks():
        legal, columns = block.legal, space.columns(block)
        for place, condition in enumerate((None, *conditions)):
            legal = legal if condition is None else legal & condition.holds(columns)
            seen[place] |= _of_block(block, legal)
    for why, pairs in zip((NO_SCHEDULE, *(each.option for each in conditions)), seen, strict=True):
        yield why, _AXES, pairs


def _of_block(block: PlanBlock, legal: Bools) -> set[Pair]:
    """The values of plans of a block."""
    pairs = set()
    for place, field in enumerate(InnerAxes.__dataclass_fields__, 1):
        there = legal.any(axis=tuple(axis for axis in range(legal.ndim) if axis != place))
        values = getattr(block.inner, field)
        pairs |= _pairs(field, [values[each] for each in np.flatnonzero(there)])
    prefixes = np.flatnonzero(legal.any(axis=tuple(range(1, legal.ndim))))
    return pairs | {(name, int(value)) for name in OUTER_AXES for value in np.unique(block.column(name)[prefixes])}


def _pairs(field: str, values: Iterable[Value]) -> set[Pair]:
    """The axes of plans with their values, by values of a field of `InnerAxes`."""
    if field == "orders":
        rows = ((each.choice.name, each.limit, each.overlap) for each in values)
        return {pair for row in rows for pair in zip(_COLUMNS[field], row, strict=True)}
    return {(_COLUMNS[field][0], value) for value in values}


# What no axis has.


def _structure(problem: PlanProblem) -> Iterator[SpaceFact]:
    """How ranks share the model and lie on devices, and what the software of every plan does."""
    parts = all_parts(problem.model)
    for axis, name in (("tp", "parts that tp splits"), ("ep", "parts that ep splits")):
        yield SpaceFact(name, tuple(part.value for part, row in parts.items() if row.shards == axis))
    whole = tuple(part.value for part, row in parts.items() if row.shards == "ep")
    if whole:
        yield SpaceFact("parts that tp splits", whole, "expert ranks alone share them")
    yield SpaceFact("order of ranks", RANK_ORDER)
    yield SpaceFact("order of ranks", ("any other",), "groups lie on devices in this order when they are priced")
    traits = asdict(problem.stack)
    numbers = {name: value for name, value in traits.items() if not isinstance(value, bool)}
    has = (*(name for name, value in traits.items() if value is True), *(f"{name} {numbers[name]}" for name in numbers))
    yield SpaceFact("software", has)
    yield SpaceFact("software", tuple(name for name, value in traits.items() if value is False), "not in this stack")


def _lines(problem: PlanProblem) -> Iterator[SpaceFact]:
    """Lines of plans that no plan of a space has. Under a record some have copies of experts."""
    used = COPYING if problem.copied else ()
    for row in unused_lines():
        if row.word in used:
            continue
        yield SpaceFact(LINE, (row.word,), row.meaning)
