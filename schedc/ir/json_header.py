"""The table of fields that the machine forms of a Program share: all but its rows and spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.ir.json_reader import OLD_VERSIONS, VERSION, WITH_WORKS, JsonReader, fields_of, read_value
from schedc.ir.placement import Placement
from schedc.ir.plan import NO_PLAN, Plan
from schedc.ir.plan_text import plan_of_line
from schedc.ir.program import Program
from schedc.ir.ties import Tie
from schedc.ir.works import DTYPES, GROUP_NAMES, KIND_NAMES, LANE_NAMES, WorkGroup, Works
from schedc.source import Span

_WORDS = {"kind": KIND_NAMES, "lane": LANE_NAMES, "group": GROUP_NAMES}
"""Columns of works that are written by name."""


class Field(NamedTuple):
    """A field of a file. write: its value in JSON, None where it is left out. read: the value at a path.

    of: the field of `Program`. optional: whether a file may lack it.
    """

    of: str
    write: Callable[[Program], Any]
    read: Callable[[JsonReader, Any, str], Any]
    optional: bool = False


def header_of(program: Program, schema: str) -> dict[str, Any]:
    """The fields of a program besides its rows and spans, as JSON takes them."""
    written = ((name, field.write(program)) for name, field in FIELDS.items())
    return {"schema": schema, "version": VERSION} | {name: value for name, value in written if value is not None}


def read_header(reader: JsonReader, more: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The object that the reader's text holds, and the fields of a `Program` from it. more: fields beside `FIELDS`."""
    top = reader.top()
    required = ("schema", "version", *more, *(name for name, field in FIELDS.items() if not field.optional))
    reader.fields(top, "", required, optional=[name for name, field in FIELDS.items() if field.optional])
    if ("layout" in top) != ("layers" in top):
        reader.fail("", f"field `{'layers' if 'layout' in top else 'layout'}` is missing")
    old = top["version"] in OLD_VERSIONS
    if old and ("works" in top) != (top["version"] == WITH_WORKS):
        reader.fail("works", f"version {WITH_WORKS} has works, and version 1 has none")
    given = [name for name in FIELDS if name in top and not (old and name == "plan")]
    values = {FIELDS[name].of: FIELDS[name].read(reader, top[name], name) for name in given}
    if old and "plan" in top:
        values["plan"] = plan_of_line(reader.string(top["plan"], "plan"), values["placement"].stages)
    return top, values


def _written_placement(program: Program) -> dict[str, Any]:
    place = program.placement
    homes, first = place.rank_of_stage.tolist(), list(place.first_microbatch)
    return {"ranks": place.ranks, "rank_of_stage": homes, "first_microbatch": first}


def _placement(reader: JsonReader, value: Any, path: str) -> Placement:
    fields = reader.fields(value, path, ("ranks", "rank_of_stage", "first_microbatch"))
    ranks = reader.integer(fields["ranks"], f"{path}.ranks", 1, 2**20)
    pipes = reader.items(fields["rank_of_stage"], f"{path}.rank_of_stage")
    homes = [reader.integers(home, f"{path}.rank_of_stage[{i}]", 0, ranks) for i, home in enumerate(pipes)]
    if not homes or not homes[0] or any(len(home) != len(homes[0]) for home in homes):
        reader.fail(f"{path}.rank_of_stage", "every pipe has the same stages, at least one")
    first = reader.integers(fields["first_microbatch"], f"{path}.first_microbatch", 0, 2**31)
    if len(first) != len(homes) + 1 or first[0] != 0 or any(np.diff(first) < 1):
        reader.fail(f"{path}.first_microbatch", f"0 and {len(homes)} ascending numbers are expected")
    return Placement(np.array(homes, np.int32), tuple(first), ranks)


def _sizes(reader: JsonReader, value: Any, path: str) -> dict[str, int]:
    if not isinstance(value, dict):
        reader.fail(path, "an object is expected")
    return dict(zip(value, reader.integers(list(value.values()), path, -(2**63), 2**63), strict=True))


def _value(kind: Any) -> Callable[[JsonReader, Any, str], Any]:
    return lambda reader, value, path: read_value(reader, kind, value, path)


def _layout(reader: JsonReader, value: Any, path: str) -> str:
    return reader.string(value, path) or reader.fail(path, "an empty layout")


def _written_works(program: Program) -> dict[str, list[Any]] | None:
    """The columns of works, without groups where every work is local; None without works."""
    works = program.works
    names = [name for name in DTYPES if name != "group" or (works.group != WorkGroup.LOCAL).any()]
    columns = {name: getattr(works, name).tolist() for name in names}
    columns |= {name: [_WORDS[name][i - _LEAST[name]] for i in columns[name]] for name in names if name in _WORDS}
    return columns if len(works) else None


_LEAST = {"kind": 0, "lane": 0, "group": int(WorkGroup.LOCAL)}
"""What the first word of a column means."""


def _works(reader: JsonReader, value: Any, path: str) -> Works:
    fields = reader.fields(value, path, [name for name in DTYPES if name != "group"], optional=("group",))
    columns: dict[str, list[Any]] = {}
    for name, items in fields.items():
        at = f"{path}.{name}"
        if name in _WORDS:
            columns[name] = [_LEAST[name] + i for i in reader.words(items, at, _WORDS[name], f"{name} of a work")]
        elif name == "bytes":
            columns[name] = [
                read_value(reader, float, size, f"{at}[{i}]") for i, size in enumerate(reader.items(items, at))
            ]
        else:
            columns[name] = reader.integers(items, at, -1 if name == "microbatch" else 0, 2**31)
    columns.setdefault("group", [WorkGroup.LOCAL] * len(columns["kind"]))
    if len({len(column) for column in columns.values()}) > 1 or not columns["kind"]:
        reader.fail(path, "columns of one length are expected, with one work at least")
    return Works(**{name: np.array(columns[name], dtype) for name, dtype in DTYPES.items()})


FIELDS = {
    "name": Field("name", lambda program: program.name, JsonReader.string),
    "doc": Field("doc", lambda program: program.doc, JsonReader.string),
    "source": Field("source_name", lambda program: program.source_name, JsonReader.string),
    "sizes": Field("sizes", lambda program: dict(program.sizes), _sizes),
    "placement": Field("placement", _written_placement, _placement),
    "phases": Field("phases", lambda program: list(program.phases), _value(tuple[str, ...])),
    "layout": Field("layout", lambda program: program.layout or None, _layout, optional=True),
    "layers": Field(
        "layers",
        lambda program: program.layers or None,
        lambda reader, value, path: reader.integer(value, path, 1, 2**20),
        optional=True,
    ),
    "plan": Field(
        "plan",
        lambda program: None if program.plan == NO_PLAN else fields_of(program.plan),
        _value(Plan),
        optional=True,
    ),
    "tied": Field("tied", lambda program: fields_of(program.tied) or None, _value(tuple[Tie, ...]), optional=True),
    "segments": Field(
        "segments",
        lambda program: program.segments if program.segments > 1 else None,
        lambda reader, value, path: reader.integer(value, path, 2, 2**16),
        optional=True,
    ),
    "works": Field("works", _written_works, _works, optional=True),
    "communicators": Field(
        "communicators",
        lambda program: program.communicators.tolist() or None,
        lambda reader, value, path: np.array(reader.integers(value, path, 0, 2**31), np.int32),
        optional=True,
    ),
}
"""The fields by name, in the order of a file."""


def spans_of(program: Program) -> list[list[int]]:
    """[spans] line, column, end line, end column."""
    return [[span.line, span.column, span.end_line, span.end_column] for span in program.spans]


def check_indexes(
    reader: JsonReader,
    path: str,
    columns: dict[str, npt.NDArray[Any]],
    phases: tuple[str, ...],
    spans: tuple[Span, ...],
) -> None:
    """Checks that ``phase`` and ``span``, each [n], are in their tables: messages name every instruction by them."""
    for name, limit in (("phase", len(phases)), ("span", len(spans))):
        if columns[name].size and not 0 <= columns[name].min() <= columns[name].max() < limit:
            reader.fail(path, f"a {name} is not in 0 ..< {limit}")
