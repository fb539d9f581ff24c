"""Recognizes the placement of orders at several sizes, and says it as text of the language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule


@dataclass(frozen=True)
class PlacementForm:
    """A placement at every size, as text.

    place: the argument of `place`. parameter: a size beside P and M, with its role; None if there is none.
    per_rank: chunks of a rank for a parameter of 1. chunks, stage: number of chunks, and stage of chunk j on rank r.
    """

    place: str
    parameter: tuple[str, str] | None
    per_rank: int
    chunks: str
    stage: str

    @property
    def pipes(self) -> int:
        """Directions in which microbatches go, each with its own copy of the weights."""
        return 2 if self.place == _TWO_PIPES else 1

    @property
    def chunk(self) -> str:
        """What stands behind the letter of an op of chunk j."""
        return "" if self.place == "linear" else "[j]"

    @property
    def unit(self) -> str:
        """What ``per_rank`` multiplies to give the number of stages."""
        return "P" if self.parameter is None else f"{self.parameter[0]}*P"

    def sizes(self, schedule: Schedule) -> dict[str, int]:
        """The sizes of the text that are those of an order."""
        placement = schedule.placement
        sizes = {"P": placement.ranks, "M": placement.microbatches}
        if self.parameter is not None:
            sizes[self.parameter[0]] = placement.stages // (placement.ranks * self.per_rank)
        return sizes


_ZIGZAG = "j*P + (r if j % 2 == 0 else P-1-r)"
_TWO_PIPES = "pipes { down(M/2): stage s on rank s   up(M/2): stage s on rank P-1-s }"
FAMILIES = (
    PlacementForm("linear", None, 1, "1", "r"),
    PlacementForm("v", None, 2, "2", _ZIGZAG),
    PlacementForm("loop(v)", ("v", "chunks"), 1, "v", "j*P + r"),
    PlacementForm("waves(w)", ("w", "count"), 2, "2*w", _ZIGZAG),
    PlacementForm(_TWO_PIPES, None, 1, "2", ""),
)
"""The placements that are recognized; the first that fits all orders is taken."""


def _snake(stage: Int64, ranks: int) -> Int64:
    return np.where(stage // ranks % 2 == 1, ranks - 1 - stage % ranks, stage % ranks)


_RANKS: dict[str, Callable[[Int64, int], Int64]] = {
    "linear": lambda stage, ranks: stage,
    "v": _snake,
    "loop(v)": lambda stage, ranks: stage % ranks,
    "waves(w)": _snake,
    _TWO_PIPES: lambda stage, ranks: stage,
}


def common_placement(orders: Sequence[Schedule]) -> PlacementForm | None:
    """The placement of all orders; None if no row of `FAMILIES` is."""
    return next((family for family in FAMILIES if all(_fits(family, order.placement) for order in orders)), None)


def _fits(family: PlacementForm, placement: Placement) -> bool:
    ranks, stages = placement.ranks, placement.stages
    fixed = family.parameter is None and stages != ranks * family.per_rank
    if placement.pipes != family.pipes or fixed or stages % (ranks * family.per_rank):
        return False
    down = _RANKS[family.place](np.arange(stages, dtype=np.int64), ranks)
    expected = np.stack([down, down[::-1]][: family.pipes])
    halves = family.pipes == 1 or placement.first_microbatch[1] * 2 == placement.microbatches
    return halves and np.array_equal(placement.rank_of_stage, expected)


Term = tuple[Fraction | int, str]
"""A coefficient and the text of its factor. The empty text is 1."""


def sum_text(terms: Sequence[Term]) -> str:
    """A sum with whole coefficients as text; one with others over their least common denominator, `(...) / d`."""
    terms = [(Fraction(factor), name) for factor, name in terms if factor]
    denominator = int(np.lcm.reduce([1, *(factor.denominator for factor, _ in terms)]))
    parts: list[str] = []
    for factor, name in terms:
        whole = int(factor * denominator)
        size = str(abs(whole)) if not name else name if abs(whole) == 1 else f"{abs(whole)}*{name}"
        sign = ("-" if whole < 0 else "") if not parts else (" - " if whole < 0 else " + ")
        parts.append(sign + size)
    text = "".join(parts) or "0"
    return text if denominator == 1 else f"({text}) / {denominator}"
