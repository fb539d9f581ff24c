"""Programs as JSON, as `schedc compile` writes small programs. `schedc/schemas/programs.txt` documents the fields.

A reader takes version 3, and versions 1 and 2, whose plan is its directives on one line. Version 1 has no works.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.json_header import check_indexes, header_of, read_header, spans_of
from schedc.ir.json_reader import JsonReader, Schema, compact
from schedc.ir.program import COLUMNS, EVERY_COLUMN, INT8_COLUMNS, InstructionKind, Program
from schedc.source import Source, Span

SCHEMA = Schema("schedc.program", "S391", "write one with `schedc export --to json`")

_KIND_NAMES = [kind.name for kind in InstructionKind]


def program_to_json(program: Program) -> str:
    """The program as JSON text, one line per field and per rank; ends with a newline."""
    header = header_of(program, SCHEMA.name) | {"spans": spans_of(program)}
    streams = ",\n".join(compact(_stream(program, rank)) for rank in range(program.ranks))
    lines = [f'"{name}": {compact(value)}' for name, value in header.items()]
    return "{\n" + ",\n".join([*lines, f'"streams": [\n{streams}\n]']) + "\n}\n"


def _stream(program: Program, rank: int) -> dict[str, list[Any]]:
    rows = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    kinds = {"kind": [_KIND_NAMES[kind] for kind in program.kind[rows].tolist()]}
    return kinds | {name: getattr(program, name)[rows].tolist() for name in _written(len(program.works) > 0)}


def _written(works: bool) -> tuple[str, ...]:
    """The columns of a stream besides its kinds."""
    return EVERY_COLUMN if works else COLUMNS


def program_from_json(text: str, file: str = "<json>") -> Program:
    """The program that ``text`` describes: equal to the written program.

    Names, types, lengths and ranges are checked here; whether the program can run is for
    `schedc.ir.verify_program` (`schedc.ir.load` asks both). Raises DiagnosticError: S391 for anything that is not
    the format, S392 for another schema or version.
    """
    reader = JsonReader(Source(file, text), SCHEMA)
    top, header = read_header(reader, ("spans", "streams"))
    streams = reader.items(top["streams"], "streams")
    if len(streams) != (ranks := header["placement"].ranks):
        reader.fail("streams", f"{len(streams)} streams for {ranks} ranks")
    spans = tuple(_span(reader, value, f"spans[{i}]") for i, value in enumerate(reader.items(top["spans"], "spans")))
    names = ("kind", *_written("works" in header))
    columns = [_columns(reader, stream, f"streams[{rank}]", names) for rank, stream in enumerate(streams)]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in columns]) for name in names}
    check_indexes(reader, "streams", joined, header["phases"], spans)
    starts = np.cumsum([0, *(part["kind"].size for part in columns)]).astype(np.int64)
    return Program(**header, **joined, rank_start=starts, spans=spans)


def _span(reader: JsonReader, value: Any, path: str) -> Span:
    numbers = reader.integers(value, path, 0, 2**31)
    if len(numbers) != 4:
        reader.fail(path, "line, column, end line and end column are expected")
    return Span(*numbers)


def _columns(reader: JsonReader, value: Any, path: str, names: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    out: dict[str, npt.NDArray[Any]] = {}
    for name, items in reader.fields(value, path, names).items():
        at, narrow = f"{path}.{name}", name in INT8_COLUMNS
        if name == "kind":
            numbers = reader.words(items, at, _KIND_NAMES, "kind of instruction")
        else:
            numbers = reader.integers(items, at, -1, 2**7 if narrow else 2**31)
        out[name] = np.array(numbers, np.int8 if narrow else np.int32)
    for name in names:
        if out[name].size != out["kind"].size:
            reader.fail(f"{path}.{name}", f"{out[name].size} values for {out['kind'].size} instructions")
    return out
