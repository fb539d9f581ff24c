"""Programs as JSON: small ones as `schedc compile` writes them; documented by `PROGRAM_FIELDS` and below.

One object with these fields:

    schema, version    "schedc.program" and 3, an integer; a reader refuses every other one, but for 1 and 2
    name, doc          of the schedule
    source             file that the spans point into
    sizes              size parameters by name
    placement          ranks, rank_of_stage as a list per pipe, first_microbatch
    phases             names of the phases
    spans              line, column, end line, end column
    streams            for each rank an object of columns, equally long, named and meant as those of
                       `schedc.ir.program.Program`; ``kind`` holds names
    layout, layers     only where a plan has placed the layers of a model: its string, and how many
    plan               only where the plan attaches more than layers: an object of the fields of `schedc.ir.plan.Plan`
                       that are not as by default; in versions 1 and 2 its directives on one line
    tied               only where stages share parameters: of each tie its stages, and the bytes of a copy
    works              only where works run beside compute, from version 2 on: their columns, meant as those of
                       `schedc.ir.works.Works`, with kinds, lanes and groups by name; the streams then have
                       ``work``. Without ``group`` every work is local
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.json_header import (
    HEADER_FIELDS,
    OPTIONAL_FIELDS,
    PLAN_FIELDS,
    check_indexes,
    compact,
    header_of,
    read_header,
)
from schedc.ir.json_reader import JsonReader, Schema, short
from schedc.ir.program import COLUMNS, EVERY_COLUMN, InstructionKind, Program
from schedc.source import Source, Span

SCHEMA = Schema("schedc.program", "S391", "write one with `schedc export --to json`")

PROGRAM_FIELDS = (*HEADER_FIELDS, "spans", "streams")
_INT8 = ("backward", "channel")
_KIND_NAMES = [kind.name for kind in InstructionKind]
_KIND_VALUES = {name: value for value, name in enumerate(_KIND_NAMES)}


def program_to_json(program: Program) -> str:
    """The program as JSON text, one line per field and per rank; ends with a newline."""
    spans = [[s.line, s.column, s.end_line, s.end_column] for s in program.spans]
    streams = ",\n".join(compact(_stream(program, rank)) for rank in range(program.ranks))
    lines = [f'"{name}": {compact(value)}' for name, value in (header_of(program, SCHEMA) | {"spans": spans}).items()]
    return "{\n" + ",\n".join([*lines, f'"streams": [\n{streams}\n]']) + "\n}\n"


def _stream(program: Program, rank: int) -> dict[str, list[Any]]:
    rows = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    kinds = {"kind": [_KIND_NAMES[kind] for kind in program.kind[rows].tolist()]}
    return kinds | {name: getattr(program, name)[rows].tolist() for name in _written(len(program.works) > 0)}


def _written(works: bool) -> tuple[str, ...]:
    """The columns of a stream besides its kinds."""
    return EVERY_COLUMN if works else COLUMNS


def program_from_json(text: str, file: str = "<json>") -> Program:
    """The program that ``text`` describes: equal to the one that was written.

    Names, types, lengths and ranges are checked here; whether the program can run is for
    `schedc.ir.verify_program` (`schedc.ir.load` asks both). Raises DiagnosticError: S391 for anything that is not
    the format, S392 for another schema or version.
    """
    reader = JsonReader(Source(file, text), SCHEMA)
    top = reader.fields(
        reader.parse(), "", PROGRAM_FIELDS, identify=True, together=PLAN_FIELDS, optional=OPTIONAL_FIELDS
    )
    header = read_header(reader, top)
    streams = reader.items(top["streams"], "streams")
    if len(streams) != (ranks := header["placement"].ranks):
        reader.fail("streams", f"{len(streams)} streams for {ranks} ranks")
    spans = tuple(_span(reader, value, f"spans[{i}]") for i, value in enumerate(reader.items(top["spans"], "spans")))
    written = _written("works" in header)
    columns = [_columns(reader, stream, f"streams[{rank}]", written) for rank, stream in enumerate(streams)]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in columns]) for name in ("kind", *written)}
    check_indexes(reader, "streams", joined, {"phase": len(header["phases"]), "span": len(spans)})
    return Program(
        **header,
        **joined,
        rank_start=np.cumsum([0, *(part["kind"].size for part in columns)]).astype(np.int64),
        spans=spans,
    )


def _span(reader: JsonReader, value: Any, path: str) -> Span:
    numbers = reader.integers(value, path, 0, 2**31)
    if len(numbers) != 4:
        reader.fail(path, "line, column, end line and end column are expected")
    return Span(*numbers)


def _columns(reader: JsonReader, value: Any, path: str, names: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    fields = reader.fields(value, path, ("kind", *names))
    kinds = reader.items(fields["kind"], f"{path}.kind")
    if not set(map(type, kinds)) <= {str} or not set(kinds) <= _KIND_VALUES.keys():
        index, wrong = next(
            (i, kind) for i, kind in enumerate(kinds) if type(kind) is not str or kind not in _KIND_VALUES
        )
        reader.fail(f"{path}.kind[{index}]", f"{short(wrong)} is no kind of instruction",
                    help=f"known: {', '.join(_KIND_NAMES)}")  # fmt: skip
    out: dict[str, npt.NDArray[Any]] = {"kind": np.array([_KIND_VALUES[kind] for kind in kinds], np.int8)}
    for name in names:
        limit, dtype = (2**7, np.int8) if name in _INT8 else (2**31, np.int32)
        numbers = reader.integers(fields[name], f"{path}.{name}", -1, limit)
        if len(numbers) != len(kinds):
            reader.fail(f"{path}.{name}", f"{len(numbers)} values for {len(kinds)} instructions")
        out[name] = np.array(numbers, dtype)
    return out
