"""What the two machine forms of a Program share: the fields besides its rows, and the checks of values out of JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.json_reader import OLD_VERSIONS, VERSION, JsonReader, Schema, short
from schedc.ir.placement import Placement
from schedc.ir.plan import NO_PLAN, Plan
from schedc.ir.plan_fields import fields_of, read_plan_fields
from schedc.ir.plan_text import plan_of_line
from schedc.ir.program import Program
from schedc.ir.ties import Tie
from schedc.ir.works import DTYPES, GROUP_NAMES, KIND_NAMES, LANE_NAMES, WorkGroup, Works

HEADER_FIELDS = ("schema", "version", "name", "doc", "source", "sizes", "placement", "phases")
PLAN_FIELDS = ("layout", "layers")
"""Fields that are there together, or not at all."""
OPTIONAL_FIELDS = ("plan", "tied", "works")
_PLACEMENT_FIELDS = ("ranks", "rank_of_stage", "first_microbatch")


def compact(value: object) -> str:
    """The value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def header_of(program: Program, schema: Schema) -> dict[str, Any]:
    """The fields of a program besides its rows and spans, as JSON takes them."""
    place = program.placement
    fields: dict[str, Any] = {
        "schema": schema.name,
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
    }
    if program.layout:
        fields |= {"layout": program.layout, "layers": program.layers}
    if program.plan != NO_PLAN:
        fields["plan"] = fields_of(program.plan)
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


def read_header(reader: JsonReader, top: dict[str, Any]) -> dict[str, Any]:
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


def _planned(reader: JsonReader, top: dict[str, Any]) -> dict[str, Any]:
    """Layout, layers and what else a plan attached, if it did. What the texts say is for whoever carries them out."""
    more: dict[str, Any] = {}
    if "plan" in top:
        more["plan"] = _plan(reader, top)
    more |= {"tied": _ties(reader, top["tied"])} if "tied" in top else {}
    more |= {"works": _works(reader, top["works"])} if "works" in top else {}
    if "layout" not in top:
        return more
    (layers,) = reader.integers([top["layers"]], "layers", 1, 2**20)
    if not (layout := reader.string(top["layout"], "layout")):
        reader.fail("layout", "an empty layout")
    return {"layout": layout, "layers": layers, **more}


def _plan(reader: JsonReader, top: dict[str, Any]) -> Plan:
    """The plan. Older versions have its text, which the language of plans reads."""
    if top["version"] not in OLD_VERSIONS:
        return read_plan_fields(reader, top["plan"], "plan")
    stages = len(_placement(reader, top["placement"]).rank_of_stage[0])
    return plan_of_line(reader.string(top["plan"], "plan"), stages)


def _ties(reader: JsonReader, value: Any) -> tuple[Tie, ...]:
    ties = []
    for i, item in enumerate(reader.items(value, "tied")):
        path = f"tied[{i}]"
        fields = reader.fields(item, path, ("stages", "bytes"))
        stages = reader.integers(fields["stages"], f"{path}.stages", 0, 2**31)
        (size,) = reader.integers([fields["bytes"]], f"{path}.bytes", 0, 2**63)
        ties.append(Tie(tuple(stages), size))
    return tuple(ties)


def _works(reader: JsonReader, value: Any) -> Works:
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


def _placement(reader: JsonReader, value: Any) -> Placement:
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


def _sizes(reader: JsonReader, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        reader.fail("sizes", "an object is expected")
    return dict(zip(value, reader.integers(list(value.values()), "sizes", -(2**63), 2**63), strict=True))


def check_indexes(reader: JsonReader, path: str, columns: dict[str, npt.NDArray[Any]], limits: dict[str, int]) -> None:
    """Checks that indexes are in their tables, so that messages can name every instruction.

    columns: ``phase`` and ``span``, each [n]; limits: how long the table of each is.
    """
    for name, limit in limits.items():
        if columns[name].size and not 0 <= columns[name].min() <= columns[name].max() < limit:
            reader.fail(path, f"a {name} is not in 0 ..< {limit}")
