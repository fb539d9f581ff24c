"""Columns of numbers in few bytes: multiples of a decimal step, or their differences, sorted by byte and deflated."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int64

Values = npt.NDArray[Any]

_DIGITS = 12
"""Decimal digits that numbers keep, counted from the first digit of the largest number."""

_INT32 = 2**31


@dataclass(frozen=True)
class Steps:
    """[count] numbers as multiples of a decimal step: ``values / 10**decimals``."""

    values: Int64
    decimals: int = 0


def in_steps(*columns: Values) -> list[Steps]:
    """[count] columns as multiples of one step.

    The step is the coarsest power of ten that keeps `_DIGITS` digits of the largest number of all columns. Rounding is
    monotonic: equal numbers stay equal, across columns, too.
    """
    if all(np.issubdtype(column.dtype, np.integer) for column in columns):
        return [Steps(column.astype(np.int64)) for column in columns]
    largest = max((float(np.abs(column).max(initial=0.0)) for column in columns), default=0.0)
    finest = min(_DIGITS - int(np.ceil(np.log10(largest))), 300) if largest > 0 else 0
    if largest < 2**53:
        finest = max(finest, 0)  # whole numbers stay exact
    whole = [np.rint(column * 10.0**finest).astype(np.int64) for column in columns]
    common = int(np.gcd.reduce([np.gcd.reduce(column) for column in whole if column.size] or [0]))
    decimals = finest
    while decimals > 0 and common and common % 10 == 0:
        decimals, common = decimals - 1, common // 10
    return [Steps(column // 10 ** (finest - decimals), decimals) for column in whole]


@dataclass
class Packer:
    """Collects the bytes of columns. Each call of `table` returns the data with which a reader finds its columns."""

    _parts: list[bytes] = field(default_factory=list)

    def table(self, columns: Mapping[str, Steps], running: Iterable[str] = ()) -> dict[str, Any]:
        """Adds columns of one length. Columns named in ``running`` are stored as differences from the entry before.

        Returns their length and, for each column, how to read it. Entry i is ``low`` plus the unsigned number whose
        bytes, lowest first, are the i-th of ``width`` runs of ``count`` bytes. A running column has as value i the sum
        of its entries up to i. Values are then divided by ``10**decimals``. ``whole``: whether they fit an int32 array.
        """
        count = next(iter(columns.values())).values.size
        differences = set(running)
        return {
            "count": count,
            "columns": {name: self._column(column, name in differences) for name, column in columns.items()},
        }

    def _column(self, column: Steps, running: bool) -> dict[str, Any]:
        values = column.values
        whole = column.decimals == 0 and bool((np.abs(values) < _INT32).all())
        stored = np.diff(values, prepend=0) if running else values
        low = int(stored.min(initial=0)) if stored.size else 0
        above = (stored - low).astype("<u8")
        width = (int(above.max(initial=0)).bit_length() + 7) // 8
        self._parts.append(above.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
        return {"low": low, "width": width, "running": running, "decimals": column.decimals, "whole": whole}

    def deflated(self) -> bytes:
        """All columns, in the order in which they were added, as a zlib stream (RFC 1950)."""
        return zlib.compress(b"".join(self._parts), 9)
