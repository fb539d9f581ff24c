"""Recorded routings: rows of experts by step, layer, microbatch and rank, in files of two forms.

    .npz    rows.npy [steps, layers, microbatches, ranks, experts] whole numbers: by the rank of the tokens, and expert
    JSON    {"schema": "schedc.routing/1", "rows": [steps][layers][microbatches][ranks]}: by the rank of the experts

`Pipeline.record_routing` writes archives. Earlier versions wrote JSON, which knows no experts.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from schedc.ir.arrays import Floats, Int32, Int64, bincount

LARGEST_FILE = 8 << 20
"""Most bytes of a recorded routing in JSON: it is read in a fraction of a second."""
LARGEST_ARRAY = 1 << 30
"""Most bytes of the rows in an archive, unpacked."""
SCHEMA = "schedc.routing/1"
MEMBER = "rows.npy"
"""The member of an archive that has the rows."""
ANEW = "record anew with `Pipeline.record_routing`"
"""What helps against a file that is no record."""
_AXES = "step, layer, microbatch, rank and expert"
_LONGEST_HEADER = 1024
_Table = TypeVar("_Table", Floats, Int64)
_KEPT = 2
"""The last steps of a record that are read: copies for a step follow the rows of the step before."""


class RecordSizes(NamedTuple):
    """Sizes of a record. rows: of a rank's tokens in a microbatch, the mean, rounded."""

    layers: int
    microbatches: int
    ranks: int
    rows: int


@dataclass(frozen=True)
class RecordedRows:
    """Rows that the ranks of a group had in one step. file: as the cost file names it.

    shape: (layers, microbatches, ranks). data: float64 rows of that shape.
    by_expert: [1 or 2, layers, microbatches, ranks, experts] rows of the last steps, by the rank of the tokens and by
    expert; None for a record in JSON. digest: that of by_expert. step: microbatches of a step, where those known repeat
    in it; None: all are known. known: sizes of the record that was taken for these; None for a record as it is.
    """

    file: str
    shape: tuple[int, int, int]
    data: bytes
    by_expert: Int32 | None = field(default=None, compare=False, repr=False)
    digest: str = ""
    step: int | None = None
    known: RecordSizes | None = None

    @classmethod
    def of_experts(cls, file: str, steps: Int32) -> RecordedRows:
        """From rows of the last steps, as in ``by_expert``."""
        layers, microbatches, ranks, experts = steps.shape[1:]
        homes = steps[-1].sum(axis=2, dtype=np.int64).reshape(layers, microbatches, ranks, experts // ranks).sum(axis=3)
        digest = hashlib.sha256(steps.tobytes()).hexdigest()
        return cls(file, (layers, microbatches, ranks), homes.astype(np.float64).tobytes(), steps, digest)

    @property
    def sizes(self) -> RecordSizes:
        """The sizes of the record."""
        layers, microbatches, ranks = self.shape
        return RecordSizes(layers, microbatches, ranks, round(float(self.rows.mean())))

    @property
    def of_step(self) -> RecordSizes:
        """The sizes of a step, with the microbatches that repeat."""
        return self.sizes._replace(microbatches=self.microbatches)

    @property
    def rows(self) -> Floats:
        """[layers, microbatches, ranks] rows of ranks, without repetitions."""
        return np.frombuffer(self.data, np.float64).reshape(self.shape)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step, with those that repeat."""
        return self.step or self.shape[1]

    def repeated(self, table: _Table) -> _Table:
        """[layers, microbatches of the step, ...] of [layers, microbatches or 1, ...]: known microbatches in turn."""
        if table.shape[1] != self.shape[1] or self.microbatches == self.shape[1]:
            return table
        return np.asarray(table[:, np.arange(self.microbatches) % self.shape[1]])

    def over_step(self, table: Int32 | Int64) -> Int64:
        """[...] sums over the microbatches of a step, of [microbatches, ...] with each known one once."""
        times = bincount(np.arange(self.microbatches) % self.shape[1], minlength=len(table))
        return np.asarray(np.tensordot(times, table, 1), np.int64)

    @cached_property
    def factors(self) -> Floats:
        """[layers, microbatches, ranks] rows over the mean of the step."""
        rows = self.repeated(self.rows)
        mean = rows.mean()
        return np.asarray(rows / mean if mean else np.ones(rows.shape))


def write_recording(path: Path, rows: Int32 | Int64) -> None:
    """Writes ``rows`` [steps, layers, microbatches, ranks, experts] as an archive: all of it, or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    packed = zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with packed as archive, archive.open(MEMBER, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.ascontiguousarray(rows, "<i4"), (1, 0), allow_pickle=False)
    beside.replace(path)


def read_recording(path: Path, name: str) -> RecordedRows | str:
    """The last step of a recorded routing, or what is wrong with the file. name: how messages call it."""
    try:
        with path.open("rb") as file:
            return _read_archive(file, name) if file.read(2) == b"PK" else _read_text(path, name)
    except OSError as error:
        return f"cannot read `{name}`: {error}"


def _read_archive(file: IO[bytes], name: str) -> RecordedRows | str:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(MEMBER) as member:
            header = _header(member)
            if isinstance(header, str):
                return f"the rows of `{name}` {header}"
            shape, dtype = header
            kept = min(_KEPT, shape[0])
            one = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
            for length in _pieces((shape[0] - kept) * one):
                member.read(length)
            data = member.read(kept * one)
            if len(data) != kept * one or member.read(1):
                return f"`{name}` is cut off, or longer than its shape"
    except KeyError:
        return f"`{name}` is no recorded routing: it has no member {MEMBER!r}"
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"`{name}` is damaged: {error}"
    steps = np.frombuffer(data, dtype).reshape(kept, *shape[1:])
    if (wrong := np.argwhere(steps < 0)).size:
        place = tuple(wrong[0].tolist())
        indexes = "".join(f"[{index}]" for index in (place[0] + shape[0] - kept, *place[1:]))
        return f"`{name}` has {int(steps[place])} rows at {indexes}"
    return RecordedRows.of_experts(name, np.asarray(steps, np.int32))


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]] | str:
    """Shape and type of the rows, or what is wrong with them."""
    if np.lib.format.read_magic(member) != (1, 0):
        return "are no array of .npy version 1.0"
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(member, max_header_size=_LONGEST_HEADER)
    if len(shape) != 5 or dtype.kind != "i" or dtype.itemsize > 4 or by_columns or not all(n > 0 for n in shape):
        return f"are not whole numbers of 32 bits by {_AXES}"
    if shape[4] % shape[3]:
        return f"have {shape[4]} experts on {shape[3]} ranks, which do not share them evenly"
    size = dtype.itemsize
    for length in shape:  # in Python's numbers, which do not overflow
        size *= length
    if size > LARGEST_ARRAY:
        return f"take {size:,} bytes, and those of a recorded routing at most {LARGEST_ARRAY:,}: record fewer steps"
    return shape, dtype


def _pieces(length: int, piece: int = 1 << 20) -> Iterator[int]:
    """Lengths of at most ``piece`` that add up."""
    for begin in range(0, length, piece):
        yield min(piece, length - begin)


def _read_text(path: Path, name: str) -> RecordedRows | str:
    if (size := path.stat().st_size) > LARGEST_FILE:
        return f"`{name}` has {size:,} bytes, and a recorded routing at most {LARGEST_FILE:,}: record fewer steps"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        return f"`{name}` is not JSON, or is cut off: {error.msg} at line {error.lineno}, column {error.colno}"
    except (UnicodeDecodeError, RecursionError) as error:
        return f"cannot read `{name}`: {error}"
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        return f"`{name}` is no recorded routing: it has no schema {SCHEMA!r}"
    try:
        rows = np.array(values.get("rows"))
    except ValueError:
        return f"`{name}` has rows whose lists differ in length"
    if rows.ndim != 4 or rows.dtype.kind not in "iuf" or not rows.size:
        return f"the rows of `{name}` are not numbers by step, layer, microbatch and rank"
    last = rows[-1].astype(np.float64)
    if (wrong := np.argwhere(~(np.isfinite(last) & (last >= 0)))).size:
        place = tuple(wrong[0].tolist())
        indexes = "".join(f"[{index}]" for index in (len(rows) - 1, *place))
        return f"`{name}` has {last[place]} rows at {indexes}"
    layers, microbatches, ranks = last.shape
    return RecordedRows(name, (layers, microbatches, ranks), last.tobytes())
