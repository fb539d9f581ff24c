"""Reads the trace of a run: when every op ran, and the measured timeline of a schedule.

`schedc run --trace` and `Pipeline.trace` write traces (Trace Event Format, JSON object form). A trace has a process per
rank and a slice per instruction, named in torch's notation: `0F3` or `(0F3;3B1)OVERLAP_F_B`. A pair that ran in
micro-steps has one slice per step, with the step after its name. Messages and reductions are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.ops import LETTERS
from schedc.source import Source
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import Timeline, observed
from schedc.units import equations

_OP = rf"(\d{{1,9}})([{LETTERS}])(\d{{1,9}})"
_SLICE = re.compile(rf"(?:{_OP}|\({_OP};{_OP}\)OVERLAP_F_B)(?P<part> .*)?")

_MILLISECOND = 1000.0
"""Microseconds, the format's unit, in a millisecond."""

_RANKS = 1 << 20
"""Most ranks of a trace."""
_CLOCK = 1e-6
"""Milliseconds by which slices of one rank may overlap, because times are rounded."""

Op = tuple[int, int, int]
"""Kind, stage and microbatch of an op."""


@dataclass(frozen=True)
class TraceSlice:
    """A compute instruction of a run, or a micro-step of it.

    ops: its op, or the two ops of a pair. part: the micro-step, or "". start, end: milliseconds.
    """

    rank: int
    ops: tuple[Op, ...]
    part: str
    start: float
    end: float

    @property
    def name(self) -> str:
        return _name(self.ops)


@dataclass(frozen=True)
class MeasuredRun:
    """The compute of a run. schedule, sizes: as the trace names them. slices: in the order of the file."""

    source: Source
    schedule: str
    sizes: Mapping[str, int]
    slices: tuple[TraceSlice, ...]


def read_run(text: str, name: str) -> MeasuredRun:
    """The last step in a trace. name: name of the file. Raises `DiagnosticError` (S611) for any other text."""
    source = Source(name, "")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(source, f"not JSON: {error}")
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        _refuse(source, "no JSON object with a list `traceEvents`")
    facts = document.get("otherData")
    facts = facts if isinstance(facts, dict) else {}
    if "unit" in facts:
        _refuse(source, "a predicted timeline, which `schedc export --to trace` wrote: nothing in it was measured")
    last = max(map(_step, events), default=0)
    slices = tuple(x for n, event in enumerate(events) if _step(event) == last and (x := _slice(source, n, event)))
    if not slices:
        _refuse(source, "no slice is named like an op (0F3, 1B0, (0F3;3B1)OVERLAP_F_B)")
    sizes = {key: int(v) for key, v in facts.items() if isinstance(v, str) and re.fullmatch(r"-?\d{1,18}", v)}
    return MeasuredRun(source, str(facts.get("schedule", "")), sizes, slices)


def _step(event: Any) -> int:
    """The number of the event's step; 0 where the trace has one."""
    facts = event.get("args") if isinstance(event, dict) else None
    step = facts.get("step", 0) if isinstance(facts, dict) else 0
    return step if type(step) is int else 0


def _slice(source: Source, number: int, event: Any) -> TraceSlice | None:
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return None
    match = _SLICE.fullmatch(event["name"])
    if not match:
        return None
    values = [event.get("ts"), event.get("dur")]
    start, length = (float(v) if isinstance(v, int | float) and abs(v) < 1e18 else np.nan for v in values)
    rank = event.get("pid")
    if not (isfinite(start) and isfinite(length) and length >= 0):
        _refuse(source, f"event {number} ({event['name']}) has no times: ts {values[0]!r}, dur {values[1]!r}")
    if type(rank) is not int or not 0 <= rank < _RANKS:
        _refuse(source, f"event {number} ({event['name']}) has no rank: pid {rank!r}")
    fields = [field for field in match.groups()[:-1] if field is not None]
    ops = tuple(
        (LETTERS.index(letter), int(stage), int(microbatch))
        for stage, letter, microbatch in zip(*(iter(fields),) * 3, strict=True)
    )
    return TraceSlice(rank, ops, match["part"] or "", start / _MILLISECOND, (start + length) / _MILLISECOND)


def measured_run(run: MeasuredRun, dependencies: Dependencies) -> Timeline:
    """The timeline of a run of this schedule, in milliseconds from the start of the first op.

    A pair in micro-steps lasts from the start of its first step to the end of its last. Raises `DiagnosticError`
    (S610) if the run had other ranks, ops or pairs, or another order.
    """
    cell = _cells(run, dependencies)
    start, end = np.full(len(dependencies), np.inf), np.full(len(dependencies), -np.inf)
    np.minimum.at(start, cell, [x.start for x in run.slices])
    np.maximum.at(end, cell, [x.end for x in run.slices])
    if (missing := np.flatnonzero(np.isinf(start))).size:
        rank, name = dependencies.rank[missing[0]], _cell_name(dependencies, int(missing[0]))
        more = f", nor {missing.size - 1} other cells" if missing.size > 1 else ""
        _misfit(run, dependencies, f"rank {rank} did not run {name}{more}")
    follows = np.flatnonzero(dependencies.previous >= 0)
    before = dependencies.previous[follows]
    if (early := np.flatnonzero(start[follows] < end[before] - _CLOCK)).size:
        late, first = (_cell_name(dependencies, int(cells[early[0]])) for cells in (before, follows))
        rank = dependencies.rank[follows[early[0]]]
        _misfit(
            run, dependencies, f"rank {rank} began {first} before {late} had ended, which comes first in the schedule"
        )
    start[follows] = np.maximum(start[follows], end[before])
    begin = start.min(initial=np.inf)
    return observed(dependencies, start - begin, np.maximum(start, end) - begin)


def _cells(run: MeasuredRun, dependencies: Dependencies) -> npt.NDArray[np.int64]:
    """[slices] the cell to which each slice belongs."""
    schedule = dependencies.schedule
    row_of = np.full((len(LETTERS), schedule.stages, schedule.microbatches), -1)
    row_of[schedule.kind, schedule.stage, schedule.microbatch] = np.arange(len(schedule))
    ranks = 1 + max(x.rank for x in run.slices)
    if ranks != schedule.ranks:
        _misfit(run, dependencies, f"the run had {ranks} ranks, the schedule has {schedule.ranks}")
    result, seen = [], set()
    for x in run.slices:
        rows = [int(row_of[op]) if _within(op, row_of.shape) else -1 for op in x.ops]
        for row, op in zip(rows, x.ops, strict=True):
            if row < 0 or schedule.rank[row] != x.rank:
                _misfit(run, dependencies, f"rank {x.rank} ran {x.name}; the schedule has no {_name((op,))} there")
        cell = int(dependencies.cell_of[rows[0]])
        if rows != _rows(dependencies, cell):
            here = _cell_name(dependencies, cell)
            _misfit(run, dependencies, f"rank {x.rank} ran {x.name}; the schedule has {here} there")
        if (cell, x.part) in seen and not x.part:
            _misfit(run, dependencies, f"rank {x.rank} ran {x.name} twice: a drawing is of one step")
        seen.add((cell, x.part))
        result.append(cell)
    return np.array(result, np.int64)


def _within(op: Op, shape: tuple[int, ...]) -> bool:
    return all(value < limit for value, limit in zip(op, shape, strict=True))


def _name(ops: tuple[Op, ...]) -> str:
    return " & ".join(f"{stage}{LETTERS[kind]}{microbatch}" for kind, stage, microbatch in ops)


def _cell_name(dependencies: Dependencies, cell: int) -> str:
    schedule = dependencies.schedule
    return _name(
        tuple(
            (int(schedule.kind[row]), int(schedule.stage[row]), int(schedule.microbatch[row]))
            for row in _rows(dependencies, cell)
        )
    )


def _rows(dependencies: Dependencies, cell: int) -> list[int]:
    """The row of an op, or the two rows of a pair."""
    return [int(row) for row in (dependencies.first[cell], dependencies.second[cell]) if row >= 0]


def _misfit(run: MeasuredRun, dependencies: Dependencies, message: str) -> NoReturn:
    schedule = dependencies.schedule
    note = f"the trace is of {_title(run.schedule, run.sizes)}, the drawing of {_title(schedule.name, schedule.sizes)}"
    help = "give the schedule, the sizes and (where a policy orders) the costs that the run was compiled with"
    raise DiagnosticError([Diagnostic("S610", message, notes=(note,), help=help, source=run.source)])


def _title(name: str, sizes: Mapping[str, int]) -> str:
    return f"{name or 'a schedule without a name'} ({equations(sizes)})"


def _refuse(source: Source, message: str) -> NoReturn:
    help = "give the file that `schedc run SCHEDULE --trace FILE` wrote"
    raise DiagnosticError([Diagnostic("S611", f"not the trace of a run: {message}", help=help, source=source)])
