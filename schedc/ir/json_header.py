"""What the two machine forms of a Program share: the fields besides its rows, and the checks of values out of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.placement import Placement
from schedc.ir.program import Program
from schedc.ir.ties import Tie
from schedc.ir.works import DTYPES, GROUP_NAMES, KIND_NAMES, LANE_NAMES, WorkGroup, Works
from schedc.source import NOWHERE, Source, Span

HEADER_FIELDS = ("schema", "version", "name", "doc", "source", "sizes", "placement", "phases")
PLAN_FIELDS = ("layout", "layers")
"""Fields that are there together, or not at all."""
OPTIONAL_FIELDS = ("plan", "tied", "works")
_PLACEMENT_FIELDS = ("ranks", "rank_of_stage", "first_microbatch")
_LONGEST_TEXT = 1 << 29


@dataclass(frozen=True)
class Schema:
    """What tells a form from others (name and version), the code of what is wrong with it, and what writes it.

    with_works: the version of a program with works.
    """

    name: str
    version: int
    with_works: int
    code: str
    remedy: str


def compact(value: object) -> str:
    """The value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def header_of(program: Program, schema: Schema) -> dict[str, Any]:
    """The fields of a program besides its rows and spans, as JSON takes them."""
    place = program.placement
    fields: dict[str, Any] = {
        "schema": schema.name,
        "version": schema.with_works if len(program.works) else schema.version,
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
    }
    if program.layout:
        fields |= {"layout": program.layout, "layers": program.layers}
    if program.plan:
        fields["plan"] = program.plan
    if program.tied:
        fields["tied"] = [{"stages": list(tie.stages), "bytes": tie.bytes} for tie in program.tied]
    if len(program.works):
        fields["works"] = _written_works(program.works)
    return fields


def _written_works(works: Works) -> dict[str, list[Any]]:
    """The columns of works; kinds, lanes and groups by name; without groups where every work is local."""
    named = {"kind": KIND_NAMES, "lane": LANE_NAMES, "group": GROUP_NAMES}
    columns = {name: getattr(works, name).tolist() for name in DTYPES} | {"group": (works.group + 1).tolist()}
    if (works.group == WorkGroup.LOCAL).all():
        del columns["group"]
    return {name: [named[name][i] for i in values] if name in named else values for name, values in columns.items()}


class HeaderReader:
    """Checks of JSON values; every failure names the place as a path, such as ``streams[2].peer``."""

    def __init__(self, source: Source, schema: Schema) -> None:
        self.source = source
        self.schema = schema

    def fail(self, path: str, message: str, code: str = "", help: str = "", span: Span = NOWHERE) -> NoReturn:
        text = f"{path}: {message}" if path else message
        label = Label(span, "here")
        raise DiagnosticError([Diagnostic(code or self.schema.code, text, label, help=help, source=self.source)])

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
        name, version, schema = top.get("schema"), top.get("version"), self.schema
        if name != schema.name:
            self.fail("schema", f"{short(name)} is not {schema.name}", "S392", schema.remedy)
        readable = (schema.version, schema.with_works)
        if type(version) is not int or version not in readable:
            known = " and ".join(map(str, readable))
            self.fail("version", f"{short(version)} is not a version that this schedc reads ({known})", "S392",
                      "compile the schedule again with this schedc")  # fmt: skip
        if ("works" in top) != (version == schema.with_works):
            self.fail("works", f"version {schema.with_works} has works, and version {schema.version} has none")

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
            index = next(i for i, item in enumerate(items) if type(item) is not int)
            self.fail(f"{path}[{index}]", f"{short(items[index])} is not an integer")
        if items and not low <= min(items) <= max(items) < high:
            index = next(i for i, item in enumerate(items) if not low <= item < high)
            self.fail(f"{path}[{index}]", f"{items[index]} is not in {low} ..< {high}")
        return items


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field occurs twice in one object")
    return fields


def short(value: Any) -> str:
    """A foreign value as messages show it."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def read_header(reader: HeaderReader, top: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Program that the checked fields ``top`` give: all but its rows and spans."""
    phases = reader.items(top["phases"], "phases")
    return {
        "name": reader.string(top["name"], "name"),
        "sizes": _sizes(reader, top["sizes"]),
        "placement": _placement(reader, top["placement"]),
        "phases": tuple(reader.string(value, f"phases[{i}]") for i, value in enumerate(phases)),
        "doc": reader.string(top["doc"], "doc"),
        "source_name": reader.string(top["source"], "source"),
        **_planned(reader, top),
    }


def _planned(reader: HeaderReader, top: dict[str, Any]) -> dict[str, Any]:
    """Layout, layers and what else a plan attached, if it did. What the texts say is for whoever carries them out."""
    more: dict[str, Any] = {"plan": reader.string(top["plan"], "plan")} if "plan" in top else {}
    more |= {"tied": _ties(reader, top["tied"])} if "tied" in top else {}
    more |= {"works": _works(reader, top["works"])} if "works" in top else {}
    if "layout" not in top:
        return more
    (layers,) = reader.integers([top["layers"]], "layers", 1, 2**20)
    if not (layout := reader.string(top["layout"], "layout")):
        reader.fail("layout", "an empty layout")
    return {"layout": layout, "layers": layers, **more}


def _ties(reader: HeaderReader, value: Any) -> tuple[Tie, ...]:
    ties = []
    for i, item in enumerate(reader.items(value, "tied")):
        path = f"tied[{i}]"
        fields = reader.fields(item, path, ("stages", "bytes"))
        stages = reader.integers(fields["stages"], f"{path}.stages", 0, 2**31)
        (size,) = reader.integers([fields["bytes"]], f"{path}.bytes", 0, 2**63)
        ties.append(Tie(tuple(stages), size))
    return tuple(ties)


def _works(reader: HeaderReader, value: Any) -> Works:
    fields = reader.fields(value, "works", [name for name in DTYPES if name != "group"], optional=("group",))
    named = {"kind": KIND_NAMES, "lane": LANE_NAMES} | ({"group": GROUP_NAMES} if "group" in fields else {})
    columns: dict[str, list[Any]] = {}
    for name, words in named.items():
        for i, word in enumerate(items := reader.items(fields[name], f"works.{name}")):
            if type(word) is not str or word not in words:
                reader.fail(f"works.{name}[{i}]", f"{short(word)} is no {name} of a work",
                            help=f"known: {', '.join(words)}")  # fmt: skip
        columns[name] = [words.index(word) for word in items]
    for name, low in (("stage", 0), ("microbatch", -1)):
        columns[name] = reader.integers(fields[name], f"works.{name}", low, 2**31)
    for i, size in enumerate(sizes := reader.items(fields["bytes"], "works.bytes")):
        if type(size) not in (int, float) or not 0 <= size < 2.0**63:
            reader.fail(f"works.bytes[{i}]", f"{short(size)} is no number of bytes")
    columns["bytes"] = sizes
    columns["group"] = [group - 1 for group in columns.get("group", [0] * len(sizes))]
    if len({len(column) for column in columns.values()}) > 1 or not sizes:
        reader.fail("works", "columns of one length are expected, with one work at least")
    return Works(**{name: np.array(columns[name], dtype) for name, dtype in DTYPES.items()})


def _placement(reader: HeaderReader, value: Any) -> Placement:
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


def _sizes(reader: HeaderReader, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        reader.fail("sizes", "an object is expected")
    return dict(zip(value, reader.integers(list(value.values()), "sizes", -(2**63), 2**63), strict=True))


def check_indexes(
    reader: HeaderReader, path: str, columns: dict[str, npt.NDArray[Any]], limits: dict[str, int]
) -> None:
    """Checks that indexes are in their tables, so that messages can name every instruction.

    columns: ``phase`` and ``span``, each [n]; limits: how long the table of each is.
    """
    for name, limit in limits.items():
        if columns[name].size and not 0 <= columns[name].min() <= columns[name].max() < limit:
            reader.fail(path, f"a {name} is not in 0 ..< {limit}")
