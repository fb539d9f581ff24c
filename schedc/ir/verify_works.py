"""The invariants of works in a `Program`: each is started and joined once, and no op reads what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from schedc.diagnostics import Diagnostic
from schedc.ir.arrays import Bools, Int32, Int64, bincount
from schedc.ir.program import Program
from schedc.ir.program_table import JOIN, SHOWN, START, ProgramTable
from schedc.ir.works import FACTS, LANE_NAMES, WorkGroup, WorkKind, Works


def matched_works(table: ProgramTable) -> list[Diagnostic]:
    """S330: every work has a lane, and one START with one JOIN behind, on the rank of its stage."""
    program, works = table.program, table.program.works
    rows = np.flatnonzero(program.work >= 0)
    number = program.work[rows]
    found: list[Diagnostic] = []

    def report(wrong: Bools | Int64, message: str, help: str = "") -> None:
        bad = rows[wrong]
        found.extend(table.findings(bad, lambda row: table.finding("S330", row, message, help=help)))

    alike = (program.stage[rows] == works.stage[number]) & (program.microbatch[rows] == works.microbatch[number])
    report(~alike, "this instruction names another stage or microbatch than its work")
    if found:
        return found
    report(_off_home(program, rows), "this rank does not hold the stage that the work concerns")
    starts, joins = rows[program.kind[rows] == START], rows[program.kind[rows] == JOIN]
    for which, name in ((starts, "started"), (joins, "joined")):
        times = bincount(program.work[which], minlength=len(works))
        for work in np.flatnonzero(times != 1)[:SHOWN].tolist():
            message = f"work {work}, the {works.work(work)}, is {name} {times[work]} times"
            found.append(Diagnostic("S330", message, help=f"it has to be {name} once", source=program.source))
    if found:
        return found
    start, join = np.empty((2, len(works)), np.int64)
    start[program.work[starts]], join[program.work[joins]] = starts, joins
    early = np.isin(rows, join[join < start])
    report(early, "this JOIN stands before the START of its work", "join a work behind its START")
    found += [
        table.finding("S330", int(start[work]), f"the {works.work(work)} {fault}")
        for work, fault in islice(chain(_faults(works), _unequal(works, program.rank[start])), SHOWN)
    ]
    unordered = np.flatnonzero(np.diff(start) < 0)[:1]
    report(np.isin(rows, start[unordered]), "works are numbered in the order of their STARTs, rank by rank")
    return found


def _off_home(program: Program, rows: Int64) -> Bools:
    """[rows] whether the rank of each START or JOIN does not hold the stage; of one with a microbatch: that copy."""
    stage, microbatch, rank = program.stage[rows], program.microbatch[rows], program.rank[rows]
    whole = (program.placement.rank_of_stage[:, stage] == rank).any(0)
    home = program.placement.rank_of(stage, np.maximum(microbatch, 0)) == rank
    return np.asarray(~np.where(microbatch < 0, whole, home))


def _faults(works: Works) -> Iterator[tuple[int, str]]:
    """(work, what is wrong with it) for each row that does not fit the facts of its kind."""
    for row in range(len(works)):
        work = works.work(row)
        facts = FACTS[work.kind]
        if work.lane is not facts.lane:
            yield row, f"is on the lane {LANE_NAMES[work.lane]}, and its lane is {LANE_NAMES[facts.lane]}"
        elif (work.microbatch < 0) is not facts.of_stage:
            what = "concerns a stage, and names a microbatch" if facts.of_stage else "names no microbatch"
            yield row, what
        elif work.group not in facts.groups:
            names = " or ".join(group.name.lower() for group in facts.groups)
            yield row, f"is of the group {work.group.name.lower()}, and may be of {names}"


_ENDS = {WorkKind.FETCH: WorkKind.OFFLOAD, WorkKind.DROP: WorkKind.GATHER, WorkKind.SPREAD: WorkKind.SCATTER}
"""By kind of a work that ends something: the kind of the work that has begun it."""


def _unequal(works: Works, rank: Int32) -> Iterator[tuple[int, str]]:
    """(work, what is wrong with it) for each that ends with other bytes than it began with. rank: [works]."""
    begun: dict[tuple[int, ...], list[float]] = {}
    kinds, keys = works.kind.tolist(), (rank, works.stage, works.microbatch)
    groups = np.where(np.isin(works.kind, (WorkKind.SCATTER, WorkKind.SPREAD)), works.group, WorkGroup.LOCAL)
    columns = zip(*(column.tolist() for column in (*keys, groups, works.bytes)), strict=True)
    for row, (kind, (*key, size)) in enumerate(zip(kinds, columns, strict=True)):
        if kind not in _ENDS:
            begun.setdefault((kind, *key), []).append(size)
        elif (open_works := begun.get((_ENDS[WorkKind(kind)], *key))) and (first := open_works.pop(0)) != size:
            yield row, f"moves {size:,.15g} bytes, and the {FACTS[_ENDS[WorkKind(kind)]].name} before it {first:,.15g}"
