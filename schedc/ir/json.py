"""Programs as JSON: what `schedc compile` writes and the runtime loads; documented by `PROGRAM_FIELDS` and below.

One object: ``schema`` "schedc.program" and ``version`` 1 (an integer; a reader refuses every other one), ``name``,
``doc``, ``source`` (file that the spans point into), ``sizes``, ``placement`` (ranks, rank_of_stage as a list per
pipe, first_microbatch), ``phases``, ``spans`` (line, column, end line, end column) and ``streams``: for each rank an
object of columns, equally long, named and meant as those of `schedc.ir.program.Program`; ``kind`` holds names. Where a
plan has placed the layers of a model there are also ``layout`` (its string) and ``layers`` (how many),
and ``plan`` where it attaches more than layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.placement import Placement
from schedc.ir.program import COLUMNS, InstructionKind, Program
from schedc.source import NOWHERE, Source, Span

SCHEMA, VERSION = "schedc.program", 1

PROGRAM_FIELDS = ("schema", "version", "name", "doc", "source", "sizes", "placement", "phases", "spans", "streams")
PLAN_FIELDS = ("layout", "layers")
"""Fields that are there together, or not at all."""
OPTIONAL_FIELDS = ("plan",)
_PLACEMENT_FIELDS = ("ranks", "rank_of_stage", "first_microbatch")
_STREAM_FIELDS = ("kind", *COLUMNS)
_INT8 = ("backward", "channel")
_LONGEST_TEXT = 1 << 29
_KIND_NAMES = [kind.name for kind in InstructionKind]
_KIND_VALUES = {name: value for value, name in enumerate(_KIND_NAMES)}


def program_to_json(program: Program) -> str:
    """The program as JSON text, one line per field and per rank; ends with a newline."""
    place = program.placement
    fields = {
        "schema": SCHEMA,
        "version": VERSION,
        "name": program.name,
        "doc": program.doc,
        "source": program.source_name,
        "sizes": dict(program.sizes),
        "placement": {
            "ranks": place.ranks,
            "rank_of_stage": place.rank_of_stage.tolist(),
            "first_microbatch": list(place.first_microbatch),
        },
        "phases": list(program.phases),
        "spans": [[s.line, s.column, s.end_line, s.end_column] for s in program.spans],
    }
    if program.layout:
        fields |= {"layout": program.layout, "layers": program.layers}
    if program.plan:
        fields["plan"] = program.plan
    streams = ",\n".join(_compact(_stream(program, rank)) for rank in range(program.ranks))
    lines = [f'"{name}": {_compact(value)}' for name, value in fields.items()]
    return "{\n" + ",\n".join([*lines, f'"streams": [\n{streams}\n]']) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _stream(program: Program, rank: int) -> dict[str, list[Any]]:
    rows = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    kinds = {"kind": [_KIND_NAMES[kind] for kind in program.kind[rows].tolist()]}
    return kinds | {name: getattr(program, name)[rows].tolist() for name in COLUMNS}


def program_from_json(text: str, file: str = "<json>") -> Program:
    """The program that ``text`` describes: equal to the one that was written.

    Names, types, lengths and ranges are checked here; whether the program can run is for
    `schedc.ir.verify_program` (`schedc.ir.load` asks both). Raises DiagnosticError: S391 for anything that is not
    the format, S392 for another schema or version.
    """
    reader = _Reader(Source(file, text))
    top = reader.fields(
        reader.parse(), "", PROGRAM_FIELDS, identify=True, together=PLAN_FIELDS, optional=OPTIONAL_FIELDS
    )
    placement = _placement(reader, top["placement"])
    streams = reader.items(top["streams"], "streams")
    if len(streams) != placement.ranks:
        reader.fail("streams", f"{len(streams)} streams for {placement.ranks} ranks")
    phases = tuple(
        reader.string(value, f"phases[{i}]") for i, value in enumerate(reader.items(top["phases"], "phases"))
    )
    spans = tuple(_span(reader, value, f"spans[{i}]") for i, value in enumerate(reader.items(top["spans"], "spans")))
    columns = [_columns(reader, stream, f"streams[{rank}]") for rank, stream in enumerate(streams)]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in columns]) for name in _STREAM_FIELDS}
    _check_ranges(reader, joined, {"phase": len(phases), "span": len(spans)})
    return Program(
        name=reader.string(top["name"], "name"),
        sizes=_sizes(reader, top["sizes"]),
        placement=placement,
        rank_start=np.cumsum([0, *(part["kind"].size for part in columns)]).astype(np.int64),
        **joined,
        phases=phases,
        spans=spans,
        doc=reader.string(top["doc"], "doc"),
        source_name=reader.string(top["source"], "source"),
        **_planned(reader, top),
    )


def _planned(reader: _Reader, top: dict[str, Any]) -> dict[str, Any]:
    """Layout, layers and what else a plan attached, if it did. What the texts say is for whoever carries them out."""
    more = {name: reader.string(top[name], name) for name in OPTIONAL_FIELDS if name in top}
    if "layout" not in top:
        return more
    (layers,) = reader.integers([top["layers"]], "layers", 1, 2**20)
    if not (layout := reader.string(top["layout"], "layout")):
        reader.fail("layout", "an empty layout")
    return {"layout": layout, "layers": layers, **more}


class _Reader:
    """Checks of JSON values; every failure names the place as a path, such as ``streams[2].peer``."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def fail(self, path: str, message: str, code: str = "S391", help: str = "", span: Span = NOWHERE) -> NoReturn:
        text = f"{path}: {message}" if path else message
        raise DiagnosticError([Diagnostic(code, text, Label(span, "here"), help=help, source=self.source)])

    def parse(self) -> Any:
        if len(self.source.text) > _LONGEST_TEXT:
            self.fail("", f"longer than {_LONGEST_TEXT} characters")
        try:
            return json.loads(self.source.text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            place = Span(error.lineno, error.colno, error.lineno, error.colno + 1)
            self.fail("", f"not JSON: {error.msg}", span=place)
        except (ValueError, RecursionError) as error:
            self.fail("", f"not a program: {error}")

    def fields(
        self,
        value: Any,
        path: str,
        names: Iterable[str],
        identify: bool = False,
        together: Iterable[str] = (),
        optional: Iterable[str] = (),
    ) -> dict[str, Any]:
        """An object with these fields, all or none of those that stand ``together``, and any ``optional`` ones.

        identify: a foreign schema or version is said first.
        """
        if not isinstance(value, dict):
            self.fail(path, "an object is expected")
        if identify:
            self._identify(value)
        if not value.keys().isdisjoint(together):
            names = (*names, *together)
        if unknown := sorted(value.keys() - {*names, *optional}):
            self.fail(path, f"unknown field `{unknown[0]}`", help=did_you_mean(unknown[0], (*names, *optional)))
        if missing := [name for name in names if name not in value]:
            self.fail(path, f"field `{missing[0]}` is missing")
        return value

    def _identify(self, top: dict[str, Any]) -> None:
        schema, version = top.get("schema"), top.get("version")
        if schema != SCHEMA:
            self.fail("schema", f"{_short(schema)} is not {SCHEMA}", "S392", "write one with `schedc export --to json`")
        if type(version) is not int or version != VERSION:
            self.fail("version", f"{_short(version)} is not a version that this schedc reads ({VERSION})", "S392",
                      "compile the schedule again with this schedc")  # fmt: skip

    def items(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(path, "a list is expected")
        return value

    def string(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            self.fail(path, "a string is expected")
        return value

    def integers(self, value: Any, path: str, low: int, high: int) -> list[int]:
        """A list of integers in low ..< high (true, false and 1.0 are none)."""
        items = self.items(value, path)
        if not set(map(type, items)) <= {int}:
            at = next(i for i, item in enumerate(items) if type(item) is not int)
            self.fail(f"{path}[{at}]", f"{_short(items[at])} is not an integer")
        if items and not low <= min(items) <= max(items) < high:
            at = next(i for i, item in enumerate(items) if not low <= item < high)
            self.fail(f"{path}[{at}]", f"{items[at]} is not in {low} ..< {high}")
        return items


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field occurs twice in one object")
    return found


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def _placement(reader: _Reader, value: Any) -> Placement:
    fields = reader.fields(value, "placement", _PLACEMENT_FIELDS)
    (ranks,) = reader.integers([fields["ranks"]], "placement.ranks", 1, 2**20)
    pipes = reader.items(fields["rank_of_stage"], "placement.rank_of_stage")
    homes = [reader.integers(home, f"placement.rank_of_stage[{i}]", 0, ranks) for i, home in enumerate(pipes)]
    if not homes or not homes[0] or any(len(home) != len(homes[0]) for home in homes):
        reader.fail("placement.rank_of_stage", "every pipe has the same stages, at least one")
    first = reader.integers(fields["first_microbatch"], "placement.first_microbatch", 0, 2**31)
    if len(first) != len(homes) + 1 or first[0] != 0 or any(np.diff(first) < 1):
        reader.fail("placement.first_microbatch", f"0 and {len(homes)} ascending numbers are expected")
    return Placement(np.array(homes, np.int32), tuple(first), ranks)


def _sizes(reader: _Reader, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        reader.fail("sizes", "an object is expected")
    return dict(zip(value, reader.integers(list(value.values()), "sizes", -(2**63), 2**63), strict=True))


def _span(reader: _Reader, value: Any, path: str) -> Span:
    numbers = reader.integers(value, path, 0, 2**31)
    if len(numbers) != 4:
        reader.fail(path, "line, column, end line and end column are expected")
    return Span(*numbers)


def _columns(reader: _Reader, value: Any, path: str) -> dict[str, npt.NDArray[Any]]:
    fields = reader.fields(value, path, _STREAM_FIELDS)
    kinds = reader.items(fields["kind"], f"{path}.kind")
    if not set(map(type, kinds)) <= {str} or not set(kinds) <= _KIND_VALUES.keys():
        at, wrong = next((i, kind) for i, kind in enumerate(kinds) if type(kind) is not str or kind not in _KIND_VALUES)
        reader.fail(f"{path}.kind[{at}]", f"{_short(wrong)} is no kind of instruction",
                    help=f"known: {', '.join(_KIND_NAMES)}")  # fmt: skip
    out: dict[str, npt.NDArray[Any]] = {"kind": np.array([_KIND_VALUES[kind] for kind in kinds], np.int8)}
    for name in COLUMNS:
        limit, dtype = (2**7, np.int8) if name in _INT8 else (2**31, np.int32)
        numbers = reader.integers(fields[name], f"{path}.{name}", -1, limit)
        if len(numbers) != len(kinds):
            reader.fail(f"{path}.{name}", f"{len(numbers)} values for {len(kinds)} instructions")
        out[name] = np.array(numbers, dtype)
    return out


def _check_ranges(reader: _Reader, columns: dict[str, npt.NDArray[Any]], limits: dict[str, int]) -> None:
    """That ``phase`` and ``span`` name what exists, so that any instruction can be described."""
    for name, limit in limits.items():
        if columns[name].size and not 0 <= columns[name].min() <= columns[name].max() < limit:
            reader.fail("streams", f"a {name} is not in 0 ..< {limit}")
