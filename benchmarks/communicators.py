"""What communicators cost: steps whose messages queue, under each assignment; receives that are posted too early.

All figures are times of the model of `schedc.step.program.queues`; nothing is run. F, I and W take 10 ms, a message
takes 2 ms, and M = 2 P. Programs are ordered under unit costs, as `schedc.compile` does where no costs are given, and
under these costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import schedc
from schedc.ir.communicators import ASSIGNMENTS, Ends
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program
from schedc.ir.verify_program import verify_program
from schedc.step.costs.costs import Costs
from schedc.step.program.queues import QueuedProgram, choose_communicators

COSTS = Costs(F=10.0, I=10.0, W=10.0, p2p=2.0)

TABLE = {
    "interleaved_1f1b": (1264, 1398, 1264, 1264, 1264),
    "interleaved_overlap": (1278, 1570, 1320, 1278, 1278),
    "looped_bfs": (1260, 1418, 1260, 1260, 1260),
    "1f1b_overlap": (748, 802, 774, 748, 748),
    "vhalf": (1288, 1384, 1288, 1288, 1288),
    "dualpipe": (594, 622, 622, 612, 594),
    "dualpipev": (1208, 1248, 1248, 1248, 1208),
}
"""Milliseconds at P = 8 of programs ordered under unit costs, by `COLUMNS`.

A prototype apart from this code found them: a queue per rank and communicator, over lists of instructions.
"""
COLUMNS = ("alone", "one", "pair", "edge", "edge and channel")
SAME = ("1f1b", "zbh1", "zbh2", "vmin", "hanayo", "chimera")
"""Schedules without a loss under one communicator."""
EARLY = ("one", "pair")
"""Assignments under which receives that are posted a cell earlier deadlock; per edge they run."""


def steps(ranks: int = 8, names: Sequence[str] = (*TABLE, *SAME)) -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of cases, the names of those that fail, and the times of each schedule."""
    cases = list(judged(ranks, names))
    rows = [row(name, ranks, costs) for name in names for costs in (None, COSTS)]
    return len(cases), [name for name, right in cases if not right], rows


def judged(ranks: int, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The name of each case, and whether it is right."""
    for name in names:
        unit, ordered = (compiled(name, ranks, costs) for costs in (None, COSTS))
        queued = QueuedProgram.of(unit, COSTS)
        times = [queued.makespan(None), *(queued.makespan(queued.ends.assigned(each)) for each in COLUMNS[1:])]
        if ranks == 8 and name in TABLE:
            yield f"{name}: {times} ms", times == list(TABLE[name])
        if name in SAME:
            yield f"{name}: one communicator is enough", times[1] == times[0]
        for program in (unit, ordered):
            for assignment in ASSIGNMENTS[1:]:
                assigned = replace(program, communicators=Ends.of(program).assigned(assignment))
                yield f"{name}: runs by {assignment}", not verify_program(assigned)
        early = earlier_receives(unit)
        for assignment in (*EARLY, "edge"):
            code, stuck = judgement(early, assignment), assignment in EARLY
            right = code == ("" if not stuck else "S310" if assignment == "one" else "S324")
            yield f"{name}: receives a cell earlier by {assignment}: {code or 'runs'}", right


def compiled(name: str, ranks: int, costs: Costs | None) -> Program:
    """A program of the library at M = 2 P."""
    return schedc.compile(name, costs=costs, P=ranks, M=2 * ranks)


def judgement(program: Program, assignment: str) -> str:
    """The code of the first finding about a program under an assignment; empty where it runs.

    The walk must say the same: a step that deadlocks never ends.
    """
    ends = Ends.of(program)
    numbers = ends.assigned(assignment)
    findings = verify_program(replace(program, communicators=numbers if assignment != "one" else numbers[:0]))
    stuck = QueuedProgram.of(program, COSTS).makespan(numbers) == float("inf")
    if findings and not findings[0].notes[0].startswith("the shortest circle: rank"):
        return f"{findings[0].code} without a circle"
    return findings[0].code if findings and stuck else "" if not findings and not stuck else "walk and check differ"


def earlier_receives(program: Program) -> Program:
    """The program with every receive posted one cell earlier, ahead of the batch that it was in."""
    computes = program.kind <= InstructionKind.CELL
    gap = np.cumsum(computes) - computes + program.rank
    first = np.concatenate([[0], np.cumsum(np.bincount(program.rank[computes], minlength=program.ranks) + 1)])
    receives = program.kind == InstructionKind.RECV
    moved = np.where(receives, np.maximum(gap - 1, first[program.rank]), gap)
    order = np.lexsort((np.arange(len(program)), ~receives, moved))
    columns = {name: getattr(program, name)[order] for name in ("kind", *EVERY_COLUMN)}
    return replace(program, **columns | {"batch": np.full(len(program), -1, np.int32)})


def row(name: str, ranks: int, costs: Costs | None) -> dict[str, Any]:
    """Times under each assignment, and the one that is chosen. costs: the costs by which messages are ordered."""
    queued = QueuedProgram.of(compiled(name, ranks, costs), COSTS)
    chosen = choose_communicators(queued)
    times = {each: queued.makespan(queued.ends.assigned(each)) for each in ASSIGNMENTS}
    return {
        "schedule": name,
        "ordered": "unit" if costs is None else "given",
        "alone": chosen.alone,
        **times,
        "chosen": chosen.name,
        "communicators": chosen.per_rank,
        "one_longer": round(100 * (chosen.one / chosen.makespan - 1), 1),
    }
