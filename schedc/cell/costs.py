"""How long the segments and exchanges of a cell take: measured times by role, per layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from schedc.cell.graph import Node, StageShape
from schedc.cell.program import Half


class SegmentTimes(NamedTuple):
    """Times of a segment in any one unit, of one microbatch. Of an exchange: forward and input_gradient."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
_NOTHING = SegmentTimes(0.0)


@dataclass(frozen=True)
class CellCosts:
    """Times by role.

    segments: of ``attention``, ``permute``, ``experts``, ``shared``, ``post``, ``dense``, ...; roles that are not
        there take no time. ``post`` is what a MoE layer does after its last exchange: at the end of a stage it is a
        segment, elsewhere it is part of the next layer's attention, whose time is then the sum of both.
    exchanges: of ``dispatch.rail``, ``combine.node``, ``routing.rail``, ...
    A full name, ``2.experts`` or ``0.dispatch.rail``, goes before its role.
    """

    segments: tuple[tuple[str, SegmentTimes], ...] = ()
    exchanges: tuple[tuple[str, SegmentTimes], ...] = ()

    @classmethod
    def of(
        cls, segments: Mapping[str, SegmentTimes], exchanges: Mapping[str, SegmentTimes | float] | None = None
    ) -> CellCosts:
        """From tables; the one number of an exchange is its time in either direction."""
        both = {
            name: time if isinstance(time, SegmentTimes) else SegmentTimes(float(time), float(time))
            for name, time in (exchanges or {}).items()
        }
        return cls(tuple(sorted(segments.items())), tuple(sorted(both.items())))

    def __hash__(self) -> int:  # costs are keys wherever programs are kept
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.exchanges))

    def __reduce__(self) -> tuple[object, ...]:  # hashes of texts are not those of another process
        return CellCosts, (self.segments, self.exchanges)

    @cached_property
    def _table(self) -> dict[str, SegmentTimes]:
        return {**dict(self.segments), **dict(self.exchanges)}

    def times(self, shape: StageShape, at: int) -> SegmentTimes:
        """Times of node ``at`` of a stage."""
        node = shape.nodes[at]
        if node.name in self._table:
            return self._table[node.name]
        own = self._table.get(_key(node), _NOTHING)
        if node.role == "attention" and any(shape.nodes[before].exchange for before in node.after):
            return SegmentTimes(
                *(one + other for one, other in zip(own, self._table.get("post", _NOTHING), strict=True))
            )
        return own

    def duration(self, shape: StageShape, half: Half, at: int) -> float:
        """Time of one half of a node; the forward once more takes its share of the forward."""
        if half is Half.RECOMPUTE:
            return self.times(shape, at).forward * shape.nodes[at].share
        return self.times(shape, at)[_HALVES.index(half)]


def _key(node: Node) -> str:
    return f"{node.role}.{node.lane}" if node.exchange else node.role
