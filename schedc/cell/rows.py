"""The table ``[cell.rows]`` of a cost file: how many rows the ranks of an expert group have, against the mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from schedc.cell.recorded_rows import ANEW, RecordedRows, read_recording
from schedc.ir.arrays import Floats

KEYS = ("imbalance", "per_rank", "recorded")
MOST_RANKS = 65_536
"""Most ranks of an expert group; more is a mistake of the writer."""
LARGEST_FACTOR = 1e6

Problem = tuple[str, str, str, str]
"""Code, message, the key that is wrong, and help."""


@dataclass(frozen=True)
class CellRows:
    """Rows of the ranks of an expert group, as factors of the rows that a table of cells has its times for.

    One of the three is given. imbalance: that of the fullest rank, beside one with the mean. per_rank: [ranks], the
    same in each layer and microbatch. recorded: those of a step.
    """

    imbalance: float | None = None
    per_rank: tuple[float, ...] | None = None
    recorded: RecordedRows | None = None

    @cached_property
    def factors(self) -> Floats:
        """[layers or 1, microbatches or 1, ranks] factors, the first two axes of length 1 where all are alike."""
        if self.recorded is not None:
            return self.recorded.factors
        factors = (self.imbalance, 1.0) if self.per_rank is None else self.per_rank
        return np.array(factors, np.float64).reshape(1, 1, -1)

    @property
    def ranks(self) -> int | None:
        """Number of ranks of the group; None where the table does not say it."""
        return None if self.imbalance is not None else int(self.factors.shape[2])


def read_rows(value: object, folder: Path) -> tuple[CellRows | None, list[Problem]]:
    """The rows of a parsed table, None if they are wrong, and the findings.

    folder: where the path of a recorded routing begins.
    """
    example = 'write one of imbalance = 1.3, per_rank = [1.2, 0.8], recorded = "routing.npz"'
    if not isinstance(value, Mapping) or not value:
        return None, [("S402", "`rows` is not a table with one setting", "rows", example)]
    unknown = [
        ("S401", f"`rows` has no `{key}`", key, f"known here: {', '.join(KEYS)}") for key in value if key not in KEYS
    ]
    if unknown:
        return None, unknown
    if len(value) > 1:
        second = list(value)[1]
        return None, [("S402", f"`rows` has {' and '.join(map(str, value))}", second, example)]
    key, setting = next(iter(value.items()))
    return _READERS[key](setting, folder)


def _imbalance(value: object, _folder: Path) -> tuple[CellRows | None, list[Problem]]:
    if not _number(value) or not 1 <= value <= LARGEST_FACTOR:  # type: ignore[operator]
        help = "the fullest rank has at least the mean: give a number from 1, its rows over the mean"
        return None, [("S402", f"`imbalance` is {value!r}", "imbalance", help)]
    return CellRows(imbalance=float(value)), []  # type: ignore[arg-type]


def _per_rank(value: object, _folder: Path) -> tuple[CellRows | None, list[Problem]]:
    help = "give one number per rank of the group, its rows over the mean, from 0; the fullest has at least 1"
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_RANKS:
        size = f"has {len(value)} values" if isinstance(value, list) else f"is {value!r}"
        return None, [("S402", f"`per_rank` {size}", "per_rank", help)]
    wrong = next((x for x in value if not _number(x) or not 0 <= x <= LARGEST_FACTOR), None)
    if wrong is not None or max(value) < 1:
        message = f"`per_rank` has {wrong!r}" if wrong is not None else f"`per_rank` has {max(value)!r} at most"
        return None, [("S402", message, "per_rank", help)]
    return CellRows(per_rank=tuple(map(float, value))), []


def _recorded(value: object, folder: Path) -> tuple[CellRows | None, list[Problem]]:
    if not isinstance(value, str):
        return None, [("S402", f"`recorded` is {value!r}", "recorded", 'write recorded = "routing.npz"')]
    recording = read_recording(folder / value, value)
    if isinstance(recording, str):
        return None, [("S405", recording, "recorded", ANEW)]
    return CellRows(recorded=recording), []


_READERS = {"imbalance": _imbalance, "per_rank": _per_rank, "recorded": _recorded}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_rows(rows: CellRows) -> list[str]:
    """The lines of ``[cell.rows]``; `read_rows` gives back an equal value."""
    if rows.recorded is not None:
        return ["[cell.rows]", f"recorded = {json.dumps(rows.recorded.file)}"]
    if rows.per_rank is not None:
        return ["[cell.rows]", f"per_rank = [{', '.join(map(repr, rows.per_rank))}]"]
    return ["[cell.rows]", f"imbalance = {rows.imbalance!r}"]
