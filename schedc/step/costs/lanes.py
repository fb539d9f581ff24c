"""The tables ``[lanes.d2h]`` of a cost file: what moves the bytes of a lane, and how much that slows compute down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from schedc.diagnostics import Diagnostic, did_you_mean
from schedc.ir.arrays import Floats
from schedc.ir.works import LANE_NAMES
from schedc.source import Source
from schedc.step.costs.checks import problem_in

COPY = "copy"
ENGINES = (COPY, "sm")
"""A copy engine beside the units that compute, or a kernel on these units."""

MOST_INTERFERENCE = 100.0
"""Largest interference; more is a mistake of the writer."""

_KEYS = ("engine", "interference")
_EXAMPLE = 'write engine = "sm" and interference = {sm = 0.08, copy = 0.01}'
_OF_CELLS = ("rail", "node", "host")
"""Lanes of exchanges inside cells, whose times segments have from where they were measured."""


@dataclass(frozen=True)
class LaneEngine:
    """What moves the bytes of a lane of works.

    engine: one of `ENGINES`. interference: by engine, by how much more than alone compute takes while the lane is busy:
    0.08 for 8 % more. It has an entry for ``engine``.
    """

    lane: str
    engine: str
    interference: tuple[tuple[str, float], ...]

    @property
    def slowdown(self) -> float:
        """The interference of the engine that the lane has."""
        return dict(self.interference)[self.engine]

    @property
    def by_copies(self) -> LaneEngine:
        """The lane with a copy engine; one that slows nothing down where no figure says otherwise."""
        figures = {COPY: 0.0, **dict(self.interference)}
        return replace(self, engine=COPY, interference=tuple(sorted(figures.items())))


def slowdowns(lanes: Iterable[LaneEngine]) -> Floats:
    """[lanes of works] the interference of each lane; 0 where nothing is said of it."""
    values = np.zeros(len(LANE_NAMES))
    for lane in lanes:
        values[LANE_NAMES.index(lane.lane)] = lane.slowdown
    return values


def read_lanes(value: Mapping[str, object], source: Source) -> tuple[tuple[LaneEngine, ...], list[Diagnostic]]:
    """The lanes of a parsed table ``[lanes]``, in the order of works, and findings (S401, S402) about the others."""
    lanes: list[LaneEngine] = []
    findings: list[Diagnostic] = []
    for name, table in value.items():
        if name not in LANE_NAMES:
            findings.append(_unknown(name, source))
        elif not isinstance(table, Mapping):
            findings.append(problem_in(source, "lanes", name, "S402", f"`lanes.{name}` is not a table", _EXAMPLE))
        else:
            lane, finding = _read_lane(name, table, source)
            lanes += [lane] if lane is not None else []
            findings += [finding] if finding is not None else []
    return tuple(sorted(lanes, key=lambda lane: LANE_NAMES.index(lane.lane))), findings


def _unknown(name: str, source: Source) -> Diagnostic:
    help = did_you_mean(name, LANE_NAMES)
    message = f"`{name}` is no lane of works"
    if name in _OF_CELLS:
        message = f"`{name}` is a lane of exchanges inside cells, whose interference is not modelled"
        help = "give segments the times that they have beside exchanges, in the table [cell]"
    return problem_in(source, "lanes", name, "S401", message, help)


def _read_lane(name: str, table: Mapping[str, object], source: Source) -> tuple[LaneEngine | None, Diagnostic | None]:
    def wrong(code: str, key: str, message: str, help: str = _EXAMPLE) -> tuple[None, Diagnostic]:
        return None, problem_in(source, f"lanes.{name}", key, code, message, help)

    for key in table:
        if key not in _KEYS:
            return wrong("S401", key, f"`lanes.{name}` has no `{key}`", did_you_mean(key, _KEYS))
    engine, given = table.get("engine"), table.get("interference")
    if engine not in ENGINES:
        told = f"has engine {engine!r}" if "engine" in table else "says no engine"
        return wrong("S402", "engine", f"`lanes.{name}` {told}", 'write engine = "copy" or engine = "sm"')
    figures: dict[str, float] = {}
    for key, figure in (given if isinstance(given, Mapping) else {engine: given}).items():
        if key not in ENGINES:
            return wrong("S401", "interference", f"`interference` has no `{key}`", did_you_mean(key, ENGINES))
        number = figure if isinstance(figure, int | float) and not isinstance(figure, bool) else -1
        if 0 <= number <= MOST_INTERFERENCE:
            figures[key] = float(number)
        else:
            what = "is missing" if figure is None else f"is {figure!r}; it is a number from 0 to {MOST_INTERFERENCE:g}"
            return wrong("S402", "interference", f"`interference` of `lanes.{name}` {what}")
    if engine not in figures:
        return wrong(
            "S402", "interference", f"`interference` of `lanes.{name}` has no figure for its engine `{engine}`"
        )
    return LaneEngine(name, str(engine), tuple(sorted(figures.items()))), None


def write_lanes(lanes: Iterable[LaneEngine]) -> list[str]:
    """The lines of the tables; `read_lanes` gives back equal values."""
    lines: list[str] = []
    for lane in lanes:
        figures = ", ".join(f"{engine} = {figure!r}" for engine, figure in lane.interference)
        lines += ["", f"[lanes.{lane.lane}]", f'engine = "{lane.engine}"', f"interference = {{{figures}}}"]
    return lines
