"""Programs as columns: typed, compressed arrays in one ``.npz`` file, for programs that are too large for JSON.

A zip archive as `numpy.savez_compressed` writes it, which `numpy.load` opens without pickles. n is the number of
instructions. Its members:

    program.json    an object with ``schema`` "schedc.columns" and ``version`` as in JSON, ``kinds`` (what the
                    numbers in ``kind`` mean, in order), and the fields of the JSON form without ``spans`` and
                    ``streams``
    rank_start.npy  [ranks + 1] rank r owns the rows rank_start[r] ..< rank_start[r + 1]
    spans.npy       [spans, 4] line, column, end line, end column
    kind.npy        [n]
    stage.npy ...   [n] one for each of `schedc.ir.program.EVERY_COLUMN`; a column that is left out is -1 in
                    every row

Arrays are signed integers, as narrow as their values allow. Equal programs give equal bytes.

A reader allocates no more than the size of the file justifies. Some columns count up from row to row, so programs
written here take more than two bytes per instruction. Files with less than a quarter of a byte per instruction are
refused.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import did_you_mean
from schedc.ir.arrays import Int64
from schedc.ir.json_header import check_indexes, header_of, read_header, spans_of
from schedc.ir.json_reader import JsonReader, Schema, compact, short
from schedc.ir.program import EVERY_COLUMN, INT8_COLUMNS, InstructionKind, Program
from schedc.source import Source, Span

SCHEMA = Schema("schedc.columns", "S393", "write one with `schedc compile --format npz`")

_HEADER, _REQUIRED = "program.json", ("rank_start", "spans", "kind")
_MEMBERS = (_HEADER, *(f"{name}.npy" for name in (*_REQUIRED, *EVERY_COLUMN)))
_KINDS = [kind.name for kind in InstructionKind]

_MAGIC = b"\x93NUMPY\x01\x00"
_ARRAY_HEADER = re.compile(
    rb"\{'descr': '([<>|]\w{1,4})', 'fortran_order': False, 'shape': \((\d{1,18},(?: ?\d{1,18})?)\), \} *\n"
)
"""The header of an array of one or two axes in C order, as numpy writes it."""
_INTEGERS = ("|i1", "<i2", "<i4", ">i2", ">i4")

_LEVEL = 1
"""The fastest of zlib: level 6 takes four times as long and saves 4 %."""
_LARGEST_HEADER = 1 << 24
_MOST_ROWS, _FEW_ROWS, _ROWS_PER_BYTE = 1 << 27, 1 << 16, 4
"""The most rows of any file, rows that every file may have, and rows for each byte of a file with more."""
_PIECE = 1 << 20

Array = npt.NDArray[np.signedinteger[Any]]


def program_to_npz(program: Program) -> bytes:
    """The program as the content of an .npz file."""
    file = BytesIO()
    kinds = [name for name in _KINDS if len(program.works) or name not in ("START", "JOIN")]
    header = header_of(program, SCHEMA.name) | {"kinds": kinds}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        with archive.open(_HEADER, "w") as member:
            member.write(compact(header).encode())
        for name, array in _arrays(program):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, (1, 0), allow_pickle=False)
    return file.getvalue()


def _arrays(program: Program) -> Iterator[tuple[str, Array]]:
    yield "rank_start", program.rank_start.astype("<i8")
    yield "spans", np.array(spans_of(program), "<i4").reshape(-1, 4)
    yield "kind", program.kind.astype("i1")
    for name in EVERY_COLUMN:
        column: Array = getattr(program, name)
        low, high = int(column.min(initial=-1)), int(column.max(initial=-1))
        if low < high:
            yield name, column.astype(_narrowest(low, high), copy=False)


def _narrowest(low: int, high: int) -> str:
    """The little-endian type of the fewest bytes that holds ``low`` to ``high``."""
    for name in ("i1", "<i2", "<i4"):
        if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
            return name
    return "<i8"


def program_from_npz(content: bytes, file: str = "<npz>") -> Program:
    """The program in the ``content`` of an .npz file: equal to the written program.

    Names, types, lengths and ranges are checked here; whether the program can run is for
    `schedc.ir.verify_program` (`schedc.ir.load` asks both). Raises DiagnosticError: S393 for anything that is not
    the format, damaged or out of proportion to the file; S392 for another schema or version.
    """
    reader = JsonReader(Source(file, ""), SCHEMA)
    with _told(reader), zipfile.ZipFile(BytesIO(content)) as archive:
        members = _Members(reader, archive, max(_FEW_ROWS, min(_MOST_ROWS, _ROWS_PER_BYTE * len(content))))
        header, kinds = members.header()
        rank_start = members.rank_start(header["placement"].ranks)
        rows = int(rank_start[-1])
        spans = members.spans()
        columns = {"kind": members.kind(rows, kinds), **{name: members.column(name, rows) for name in EVERY_COLUMN}}
    check_indexes(reader, "columns", columns, header["phases"], spans)
    return Program(**header, **columns, rank_start=rank_start, spans=spans)  # type: ignore[arg-type]


@contextmanager
def _told(reader: JsonReader) -> Iterator[None]:
    """What zipfile, zlib and numpy raise about damaged files, as findings."""
    try:
        yield
    except zipfile.BadZipFile as error:
        reader.fail("", f"not an .npz archive, damaged or cut short: {error}")
    except (
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        RuntimeError,
    ) as error:
        reader.fail("", f"damaged: {error}")


class _Members:
    """The members of an archive, each read once and no further than it is expected to reach.

    most: rows that the archive may have.
    """

    def __init__(self, reader: JsonReader, archive: zipfile.ZipFile, most: int) -> None:
        self._reader, self._archive, self._most = reader, archive, most
        names = archive.namelist()
        if unknown := sorted(set(names) - set(_MEMBERS)):
            reader.fail(short(unknown[0]), "no member of a program", help=did_you_mean(unknown[0], _MEMBERS))
        if len(names) > len(set(names)):
            reader.fail("", "a member occurs twice")
        for info in archive.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                reader.fail(info.filename, "neither stored nor deflated, or encrypted")
        self._names = set(names)

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        """A member, of which nothing may be left unread."""
        if name not in self._names:
            self._reader.fail(name, "this member is missing")
        with self._archive.open(name) as member:
            yield member
            if member.read(1):
                self._reader.fail(name, "longer than it should be")

    def header(self) -> tuple[dict[str, Any], npt.NDArray[np.int8]]:
        """The fields of the Program besides rows and spans, and what the values of ``kind`` mean."""
        with self._open(_HEADER) as member:
            text = member.read(_LARGEST_HEADER).decode()
        reader = JsonReader(Source(f"{self._reader.source.name}/{_HEADER}", text), SCHEMA)
        top, header = read_header(reader, ("kinds",))
        return header, np.array(reader.words(top["kinds"], "kinds", _KINDS, "kind of instruction"), np.int8)

    def rank_start(self, ranks: int) -> Int64:
        starts = self._array("rank_start", (ranks + 1,)).astype(np.int64)
        if starts[0] != 0 or np.any(np.diff(starts) < 0):
            self._reader.fail("rank_start", "0 and then numbers that never descend are expected")
        self._check_count("rank_start", int(starts[-1]), "instructions")
        return starts

    def spans(self) -> tuple[Span, ...]:
        table = self._array("spans", (-1, 4))
        if table.min(initial=0) < 0:
            self._reader.fail("spans", "lines and columns are no negative numbers")
        return tuple(Span(*row) for row in table.tolist())

    def kind(self, rows: int, kinds: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
        values = self._array("kind", (rows,))
        self._check_range("kind", values, 0, kinds.size)
        return kinds[values]

    def column(self, name: str, rows: int) -> npt.NDArray[Any]:
        dtype, limit = (np.int8, 1 << 7) if name in INT8_COLUMNS else (np.int32, 1 << 31)
        if f"{name}.npy" not in self._names:
            return np.broadcast_to(np.array(-1, dtype), (rows,))
        values = self._array(name, (rows,))
        self._check_range(name, values, -1, limit)
        return values.astype(dtype, copy=False)

    def _check_range(self, name: str, values: Array, low: int, high: int) -> None:
        if values.size and not low <= (least := int(values.min())) <= (most := int(values.max())) < high:
            wrong = least if least < low else most
            row = int(np.argmax(values == wrong))
            self._reader.fail(f"{name}[{row}]", f"{wrong} is not in {low} ..< {high}")

    def _check_count(self, name: str, count: int, what: str) -> None:
        if count > self._most:
            help = "a file that expands without bounds is none that schedc wrote"
            self._reader.fail(name, f"{count} {what}, out of proportion to the size of the file", help=help)

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array of a member; a length of -1 is as long as the member says."""
        with self._open(f"{name}.npy") as member:
            dtype, own = self._array_header(name, member)
            if len(own) != len(shape) or any(want not in (-1, got) for want, got in zip(shape, own, strict=True)):
                self._reader.fail(name, f"shape {short(own)}, where {short(shape)} is expected")
            self._check_count(name, own[0], "rows")
            array: Array = np.empty(own, dtype)
            self._fill(name, array.reshape(-1).view(np.uint8).data, member)
        return array.astype(dtype.newbyteorder("="), copy=False)

    def _array_header(self, name: str, member: IO[bytes]) -> tuple[np.dtype[np.signedinteger[Any]], tuple[int, ...]]:
        """Type and shape of an array. numpy's own reader evaluates the header as Python, which hostile ones abuse."""
        start = member.read(len(_MAGIC) + 2)
        header = _ARRAY_HEADER.fullmatch(member.read(int.from_bytes(start[-2:], "little")))
        if not start.startswith(_MAGIC) or header is None:
            self._reader.fail(name, "no array of .npy version 1.0 with rows one after the other")
        kind = header[1].decode()
        if kind not in (_INTEGERS if name != "rank_start" else (*_INTEGERS, "<i8", ">i8")):
            self._reader.fail(name, f"signed integers of at most 32 bits are expected, not {kind}")
        return np.dtype(kind), tuple(int(length) for length in header[2].split(b",") if length)

    def _fill(self, name: str, room: memoryview, member: IO[bytes]) -> None:
        done = 0
        while done < len(room):
            piece = member.read(min(_PIECE, len(room) - done))
            if not piece:
                self._reader.fail(name, "shorter than its shape")
            room[done : done + len(piece)] = piece
            done += len(piece)
