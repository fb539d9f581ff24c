"""Costs of a cell: measured times of its segments and exchanges, by role and layer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from schedc.cell.graph import SPLITTING, Lane, Node, StageShape, role_in
from schedc.cell.program import Half


class SegmentTimes(NamedTuple):
    """Times of a segment for one microbatch, in any one unit. An exchange has ``forward`` and ``input_gradient``."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


class SliceFactor(NamedTuple):
    """How much longer slices take than whole microbatches, together: factors of segments and of exchanges.

    slices: the number of slices that it was measured with.
    """

    slices: int
    segments: float
    exchanges: float = 1.0


OF_ROWS = frozenset({"experts", "dispatch", "combine"})
"""Roles whose times grow with the rows of a rank. Other times grow with the rank's tokens."""

_SUMMING = ("attention", "before_gather")
"""Segments that sum up the results of a layer with experts before them."""
_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
_NOTHING = SegmentTimes(0.0)


@dataclass(frozen=True)
class CellCosts:
    """Times by role, in any one unit.

    segments: times of ``attention``, ``permute``, ``experts``, ``shared``, ``post``, ``dense``, ... A role without an
        entry takes no time. ``post`` is the work of a MoE layer after its last exchange. At the end of a stage it is
        a segment. Elsewhere it is part of the next layer's attention, whose time is then the sum of both.
    exchanges: times of ``dispatch.rail``, ``combine.node``, ``routing.rail``, ...
    ``experts.again`` and the like: times of the element-wise work that a backward repeats where its node says so.
    An entry for a full name, ``2.experts`` or ``0.dispatch.rail``, overrides the entry for its role.
    slices: ascending by their numbers. A number without a factor of its own has that of the next smaller, else 1.
    brief: whether orders by these times are searched briefly, since cells then run under other times.
    """

    segments: tuple[tuple[str, SegmentTimes], ...] = ()
    exchanges: tuple[tuple[str, SegmentTimes], ...] = ()
    slices: tuple[SliceFactor, ...] = ()
    brief: bool = False

    @classmethod
    def of(
        cls, segments: Mapping[str, SegmentTimes], exchanges: Mapping[str, SegmentTimes | float] | None = None
    ) -> CellCosts:
        """Costs from tables. A single number for an exchange is its time in either direction."""
        both = {
            name: time if isinstance(time, SegmentTimes) else SegmentTimes(float(time), float(time))
            for name, time in (exchanges or {}).items()
        }
        return cls(tuple(sorted(segments.items())), tuple(sorted(both.items())))

    def __hash__(self) -> int:  # costs are keys of caches of programs
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.exchanges, self.slices, self.brief))

    def __reduce__(self) -> tuple[object, ...]:  # hashes of strings differ between processes
        return CellCosts, (self.segments, self.exchanges, self.slices, self.brief)

    @cached_property
    def _table(self) -> dict[str, SegmentTimes]:
        return {**dict(self.segments), **dict(self.exchanges)}

    @property
    def asks_host(self) -> bool:
        """Whether they give the copy of sizes to the host a time."""
        return any(name.endswith(f".{Lane.HOST}") for name, _ in self.exchanges)

    def times(self, shape: StageShape, index: int) -> SegmentTimes:
        """Times of the node with this index; of a slice, where the node runs slices."""
        node, times = shape.nodes[index], self._whole(shape, index)
        if node.slices == 1:
            return times
        share = share_of_slice(self.slices, node.slices, node.exchange)
        return SegmentTimes(*(time * share for time in times))

    def _whole(self, shape: StageShape, index: int) -> SegmentTimes:
        own = [self._table[name] for name in entries(shape, index, self._table)]
        return SegmentTimes(*map(sum, zip(*own, strict=True))) if len(own) > 1 else (own or [_NOTHING])[0]

    def _again(self, shape: StageShape, index: int) -> float:
        """Time of the element-wise work that a backward repeats."""
        node = shape.nodes[index]
        time = sum(self._table[name].forward for name in repeated_entries(node, self._table))
        return time * share_of_slice(self.slices, node.slices, node.exchange) if node.slices > 1 else time

    def with_rows(self, segments: float, exchanges: float | None = None) -> CellCosts:
        """The costs of a rank with this many times the rows. exchanges: the same for exchanges, if it is another.

        Only roles of `OF_ROWS` change.
        """

        def changed(table: tuple[tuple[str, SegmentTimes], ...], factor: float) -> tuple[tuple[str, SegmentTimes], ...]:
            return tuple(
                (name, SegmentTimes(*(time * factor for time in times))) if _of_rows(name) else (name, times)
                for name, times in table
            )

        others = segments if exchanges is None else exchanges
        return replace(self, segments=changed(self.segments, segments), exchanges=changed(self.exchanges, others))

    def without_exchange(self, role: str) -> CellCosts:
        """The costs where exchanges of this role, such as ``hot``, take no time."""
        return replace(self, exchanges=tuple(each for each in self.exchanges if role_in(each[0]) != role))

    def with_exchange(self, name: str, times: SegmentTimes) -> CellCosts:
        """The costs with the times of one more exchange, such as ``hot.node``."""
        return replace(self, exchanges=tuple(sorted({**dict(self.exchanges), name: times}.items())))

    def duration(self, shape: StageShape, half: Half, index: int) -> float:
        """Time of one half of a node, in time units.

        A recomputation takes its ``share`` of the forward. A backward takes ``inside`` of it in addition.
        """
        node, times = shape.nodes[index], self.times(shape, index)
        if half is Half.RECOMPUTE:
            return times.forward * node.share
        if half is Half.BACKWARD and (node.inside or node.again):
            return times.input_gradient + times.forward * node.inside + self._again(shape, index)
        return times[time_column(half, node.exchange)]


def time_column(half: Half, exchange: bool = False) -> int:
    """The place in `SegmentTimes` of a half's time, in units of it; a recomputation takes a share of the forward.

    An exchange has one way back, in the backward or behind W.
    """
    if exchange and half is Half.WEIGHT:
        half = Half.BACKWARD
    return 0 if half is Half.RECOMPUTE else _HALVES.index(half)


def entries(shape: StageShape, index: int, known: Container[str]) -> tuple[str, ...]:
    """The names among those ``known`` whose times, together, are those of a node for a whole microbatch."""
    node = shape.nodes[index]
    if node.whole in known:
        return (node.whole,)
    before = [shape.nodes[index] for index in node.after]
    behind = node.role in _SUMMING and any(each.exchange and each.role not in SPLITTING for each in before)
    return tuple(name for name in (_key(node), *(("post",) if behind else ())) if name in known)


AGAIN = ".again"
"""What the names of times of element-wise work that backwards repeat end with."""


def repeated_entries(node: Node, known: Container[str]) -> tuple[str, ...]:
    """The name among those ``known`` of what the backward of a node repeats element-wise; empty for none."""
    names = (node.whole + AGAIN, node.role + AGAIN) if node.again else ()
    return tuple(name for name in names if name in known)[:1]


def share_of_slice(factors: Sequence[SliceFactor], slices: int, exchange: bool) -> float:
    """Time of one of so many slices over that of the whole microbatch. factors: ascending, as in `CellCosts`."""
    last = next((factor for factor in reversed(factors) if factor.slices <= slices), SliceFactor(1, 1.0))
    return (last.exchanges if exchange else last.segments) / slices


def _of_rows(name: str) -> bool:
    """Whether the times of ``experts``, ``2.experts`` or ``0.dispatch.rail`` grow with rows."""
    return role_in(name) in OF_ROWS


def _key(node: Node) -> str:
    return f"{node.role}.{node.lane}" if node.exchange else node.role
