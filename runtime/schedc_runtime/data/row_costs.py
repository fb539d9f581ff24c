"""Costs of packed rows in whole numbers: attention costs by the squares of documents' lengths, all else by tokens."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc_runtime.errors import RuntimeFault

_FRACTION, _PICOSECONDS, _LARGEST = 20, 1e9, 1 << 62
"""Bits of a coefficient behind the point; picoseconds in a millisecond; what a sum of costs stays below."""
SCHEMA = "schedc.rows/1"
_HEAD, _KEYS = f'schema = "{SCHEMA}"', ("squared", "linear", "constant", "error")
"""The first line of a file of costs, and its keys."""


@dataclass(frozen=True)
class RowCosts:
    """The cost of a row = squared * sum of L^2 + linear * sum of L + constant, over its documents of L tokens.

    Coefficients are whole numbers, in 2^-20 of a unit of cost. Measured units are picoseconds.
    error: the largest |fitted / measured - 1| of the rows that were measured; 0 where nothing was.
    """

    squared: int
    linear: int
    constant: int = 0
    error: float = 0.0

    def __post_init__(self) -> None:
        if min(self.squared, self.linear, self.constant) < 0 or not self.squared + self.linear + self.constant:
            raise RuntimeFault(f"{self} gives rows a cost below 0, or none", "give numbers from 0 on, not all 0")

    @classmethod
    def of_milliseconds(cls, squared: float, linear: float, constant: float = 0.0, error: float = 0.0) -> RowCosts:
        """squared: milliseconds per squared token. linear: milliseconds per token. constant: milliseconds per row."""
        per_unit = _PICOSECONDS * (1 << _FRACTION)
        return cls(round(squared * per_unit), round(linear * per_unit), round(constant * per_unit), error)

    @classmethod
    def of_share(cls, share: float, tokens: int) -> RowCosts:
        """Costs by which attention takes this share, 0 to 1, of a row that is one document of ``tokens`` tokens."""
        return cls.of_milliseconds(share / tokens**2, (1 - share) / tokens)

    @classmethod
    def fit(cls, rows: Sequence[Sequence[int]], milliseconds: Sequence[float]) -> RowCosts:
        """Costs by non-negative least squares of relative errors.

        rows: lengths of the documents of each measured row. milliseconds: [rows] its measured time.
        Raises `RuntimeFault` for times that no cost follows from.
        """
        times = np.array(milliseconds, np.float64)
        if times.size != len(rows) or times.size < 2 or not np.isfinite(times).all() or (times <= 0).any():
            raise RuntimeFault(
                f"{len(rows)} rows and {times.size} times give no costs", "measure two rows or more, each above 0 ms"
            )
        table = np.array([[*sums_of_row(row), 1.0] for row in rows], np.float64)
        scale = table.max(axis=0)
        weighted = table / scale / times[:, None]
        coefficients = _non_negative(weighted, np.ones(times.size))
        error = float(np.abs(weighted @ coefficients - 1).max())
        squared, linear, constant = (coefficients / scale).tolist()
        return cls.of_milliseconds(squared, linear, constant, error)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RowCosts:
        """The costs of a file that `schedc calibrate --lengths` wrote. Raises `RuntimeFault` for another file."""
        remedy = f"give a file of `schedc calibrate --lengths`: `{_HEAD}`, and {', '.join(_KEYS)} as numbers"
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RuntimeFault(f"the costs of rows {path} cannot be read: {error}", remedy) from error
        numbers: list[Any] = [values.get(key) for key in _KEYS]
        if values.keys() != {"schema", *_KEYS} or values["schema"] != SCHEMA or not all(map(_number, numbers)):
            raise RuntimeFault(f"{path} has no costs of rows", remedy)
        return cls.of_milliseconds(*numbers)

    def text(self) -> str:
        """The file that `open` reads, in milliseconds."""
        per_unit = _PICOSECONDS * (1 << _FRACTION)
        numbers = (self.squared / per_unit, self.linear / per_unit, self.constant / per_unit, self.error)
        return "\n".join([_HEAD, *(f"{key} = {value!r}" for key, value in zip(_KEYS, numbers, strict=True)), ""])

    def milliseconds(self, rows: Sequence[Sequence[int]]) -> Floats:
        """[rows] their costs, for coefficients of measured units."""
        return self.of(rows) / _PICOSECONDS

    def of(self, rows: Sequence[Sequence[int]] | Sequence[Int64]) -> Int64:
        """[rows] their costs, in units. rows: lengths of the documents of each. Raises `RuntimeFault` above 2^62."""
        of_rows = map(sums_of_row, rows)
        costs = [self.squared * squares + self.linear * tokens + self.constant for squares, tokens in of_rows]
        units = [max(1, cost >> _FRACTION) for cost in costs]
        if sum(units) >= _LARGEST:
            raise RuntimeFault(
                "the rows of a window cost more than 2^62 together", "give RowCosts smaller coefficients"
            )
        return np.array(units, np.int64)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def sums_of_row(row: Sequence[int] | Int64) -> tuple[int, int]:
    """The sum of squares of lengths, and the sum of lengths. row: [documents] lengths, in tokens."""
    lengths = np.asarray(row, np.int64)
    return int((lengths * lengths).sum()), int(lengths.sum())


def _non_negative(table: Floats, wanted: Floats) -> Floats:
    """[columns] the numbers from 0 on with the least squares. table: [rows, columns], of three columns at most.

    Each choice of columns is fitted by itself. The closest fit without a negative number is returned.
    """
    columns = table.shape[1]
    best, least = np.zeros(columns), float((wanted * wanted).sum())
    for chosen in range(1, 1 << columns):
        kept = [column for column in range(columns) if chosen >> column & 1]
        found = np.linalg.lstsq(table[:, kept], wanted, rcond=None)[0]
        squares = float(((table[:, kept] @ found - wanted) ** 2).sum())
        if (found >= 0).all() and squares < least * (1 - 1e-12):
            best, least = np.zeros(columns), squares
            best[kept] = found
    return best
