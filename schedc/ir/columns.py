"""What both IRs have in common: columns of rows, rank by rank, over one placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from schedc.ir.arrays import Int8, Int32, Int64, repeat
from schedc.ir.placement import Placement
from schedc.units import equations

SHARED = ("name", "sizes", "placement", "phases", "spans", "doc", "layout", "layers", "plan", "tied", "segments")
"""Fields that a Schedule and the Program made of it have in common."""


class Columns:
    """Base of a frozen dataclass of columns: rank r owns rows rank_start[r] ..< rank_start[r + 1]."""

    if TYPE_CHECKING:
        name: str
        sizes: Mapping[str, int]
        placement: Placement
        rank_start: Int64
        kind: Int8

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def microbatches(self) -> int:
        return self.placement.microbatches

    def shared(self) -> dict[str, Any]:
        """The fields of `SHARED` and the source text, by name."""
        return {name: getattr(self, name) for name in (*SHARED, "source")}

    def __len__(self) -> int:
        return int(self.kind.size)

    def __repr__(self) -> str:
        sizes = f" ({equations(self.sizes)})" if self.sizes else ""
        return f"<{type(self).__name__} {self.name}{sizes}: {self.ranks} ranks, {len(self)} rows>"

    @cached_property
    def rank(self) -> Int32:
        """[n] rank of each row."""
        return repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.rank_start))

    def __eq__(self, other: object) -> bool:
        """Equal in every column and name; the source text is not part of the value."""
        if type(other) is not type(self):
            return NotImplemented
        compared = (f.name for f in fields(self) if f.compare)  # type: ignore[arg-type]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in compared)

    __hash__ = None  # type: ignore[assignment]


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
