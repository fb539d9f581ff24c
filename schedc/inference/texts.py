"""Makes a whole schedule of an inferred rank block, and compares what it compiles to with given orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.inference.families import PlacementForm, sum_text
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.legality import check_schedule
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree

_COMPARED = ("rank_start", "kind", "stage", "microbatch")


@dataclass(frozen=True)
class Frame:
    """What stands around a rank block: defaults of the sizes, and for which sizes the text is made."""

    name: str
    doc: str
    family: PlacementForm
    sizes: Mapping[str, int]
    requires: tuple[str, ...]

    def text(self, block: str, claims: Sequence[str] = ()) -> str:
        """A formatted file with this rank block and these claims."""
        extra = (
            ""
            if self.family.parameter is None
            else ", {}: {} = {}".format(*self.family.parameter, self.sizes[self.family.parameter[0]])
        )
        head = f"schedule {self.name}(P: ranks = {self.sizes['P']}, M: microbatches = {self.sizes['M']}{extra}) {{"
        require = [f"require {', '.join(self.requires)}"] if self.requires else []
        doc = [f"## {line}" for line in self.doc.splitlines()]
        expects = [f"expect {claim}" for claim in claims]
        lines = ["sched 1", "", *doc, head, *require, f"place {self.family.place}", block, *expects, "}"]
        return format_source(Source("rule.sched", "\n".join(lines) + "\n"))


def frame_of(orders: Sequence[Schedule], family: PlacementForm, name: str, doc: str, *, exact: bool) -> Frame:
    """The frame whose defaults are the sizes of the smallest order, and whose conditions all orders meet.

    exact: whether the text shall be the order of its source at every size. Nothing is known of fewer ranks than all
    orders have. Where M is the same multiple of P in all, or all P or M are even, nothing is known of others.
    """
    sizes = [family.sizes(order) for order in orders]
    requires = [f"{family.parameter[0]} >= 1"] if family.parameter is not None else []
    units = {Fraction(size["M"], size["P"]) for size in sizes}
    whole, least = all(each.denominator == 1 for each in units), int(min(units))
    if not exact:
        requires += ["M % P == 0"] * whole
    elif whole and len(units) == 1:
        requires.append(f"M == {sum_text([(least, 'P')])}")
    else:
        requires += ["M % P == 0"] * whole
        requires += [f"M >= {sum_text([(least, 'P')])}"] * (least > 0)
    if exact:
        ranks = min(size["P"] for size in sizes)
        requires += [f"P >= {ranks}"] * (ranks > 1)
        even = [name for name in "PM" if not any(size[name] % 2 for size in sizes)]
        requires += [f"{name} % 2 == 0" for name in even if name == "P" or len(units) > 1]
    return Frame(name, doc, family, sizes[0], tuple(requires))


def tree_of(text: str) -> ScheduleTree:
    """The tree of a text of one schedule."""
    return parse(Source("rule.sched", text)).schedules[0]


def order_of_text(tree: ScheduleTree, sizes: Mapping[str, int]) -> Schedule | None:
    """The legal order of a text at some sizes; None if the text has none there."""
    try:
        schedule = elaborate(tree, sizes)
    except DiagnosticError:
        return None
    return None if check_schedule(schedule) else schedule


def same_order(one: Schedule, other: Schedule) -> bool:
    """Whether two orders are op for op the same, with the same pairs."""
    columns = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in _COMPARED)
    return columns and np.array_equal(_paired(one), _paired(other))


def _paired(order: Schedule) -> np.ndarray:
    """[ops] 0 for a single op, 1 and 2 for the first and the second of a pair."""
    second = np.append(False, (order.pair[1:] == order.pair[:-1]) & (order.pair[1:] >= 0))
    return np.where(order.pair < 0, 0, np.where(second, 2, 1))
