"""The invariants of a `Program`, one function each: messages match, and all ranks reach the end.

Run on every Program that comes from a file. What `insert_communication` makes is right by the proof in that module,
so `compile` does not run it; the tests do, for every shipped schedule.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.arrays import Bools, bincount, repeat
from schedc.ir.communicators import ASSIGNMENTS, Ends
from schedc.ir.op_tables import PAIR_NUMBERS, WEIGHT
from schedc.ir.ops import OpKind
from schedc.ir.program import Channel, InstructionKind, Program
from schedc.ir.program_table import JOIN, RECV, REDUCE, SEND, SHOWN, START, WAIT, ProgramTable
from schedc.ir.rendezvous import Link, find_stuck_instructions
from schedc.ir.schedule import Schedule
from schedc.ir.verify import verify
from schedc.ir.verify_messages import GROUPS
from schedc.ir.verify_plan import verify_plan
from schedc.ir.verify_states import places_of_activations, states_of_stages
from schedc.ir.verify_ties import tied_stages, tied_sums
from schedc.ir.verify_works import matched_works

CELL = InstructionKind.CELL


def verify_program(program: Program) -> list[Diagnostic]:
    """Everything that is wrong with a program; empty if any transport that keeps the order of posts can run it.

    A program with communicators needs a transport that keeps the order of posts on each of them.

    Each group of checks relies on the ones before it, so the first group that finds something ends the search.
    The plan is judged first, by `schedc.ir.verify_plan`.
    Computation is judged by `schedc.ir.verify` (S2xx), messages by `schedc.ir.verify_messages`. The last check runs
    the program under the strictest rules: a send completes only with its receive, and each rank's messages complete
    in the order of posting, on each communicator.
    """
    if findings := verify_plan(program.plan, program.placement):
        return findings
    table = ProgramTable(program)
    works = ((matched_works,), (places_of_activations, states_of_stages)) if len(program.works) else ()
    sums = (_cells_served, tied_sums, _reductions)
    for group in ((_columns, tied_stages), (_computation,), *GROUPS, sums, *works, (_runs,)):
        if found := [diagnostic for invariant in group for diagnostic in invariant(table)]:
            return found
    return []


_FIELDS: dict[str, tuple[InstructionKind, ...]] = {
    "stage2": (CELL, REDUCE),
    "microbatch2": (CELL,),
    "backward": (CELL,),
    "peer": (SEND, RECV, WAIT, REDUCE),
    "channel": (SEND, RECV, WAIT),
    "message": (SEND, RECV, WAIT, REDUCE),
    "work": (START, JOIN),
}
"""The kinds that have a field; other kinds have -1. ``batch`` is optional in SEND and RECV, ``stage2``
in REDUCE."""


def _columns(table: ProgramTable) -> list[Diagnostic]:
    """S319: columns fit each other, and every field that applies is in range and every other one is -1."""
    program, n = table.program, len(table.program)
    columns = ("stage", "microbatch", *_FIELDS, "batch", "op", "phase", "span")
    if wrong := [name for name in columns if getattr(program, name).shape != (n,)]:
        return [Diagnostic("S319", f"column {wrong[0]} has not one value per instruction ({n})", source=program.source)]
    start = program.rank_start
    if start.shape != (program.ranks + 1,) or start[0] != 0 or start[-1] != n or (np.diff(start) < 0).any():
        message = f"rank_start does not split {n} instructions over {program.ranks} ranks"
        return [Diagnostic("S319", message, source=program.source)]
    if program.segments < 1 or (np.asarray(program.placement.first_microbatch) % program.segments).any():
        message = f"the microbatches of a pipe are no whole number of sequences of {program.segments} segments"
        return [Diagnostic("S319", message, source=program.source)]
    outside = (program.span < 0) | (program.span >= len(program.spans))
    outside |= (program.phase < 0) | (program.phase >= len(program.phases))
    if outside.any():  # before anything is described, which looks the place up
        where = int(np.flatnonzero(outside)[0])
        return [Diagnostic("S319", f"phase or span of instruction {where} does not exist", source=program.source)]
    if (bad := np.flatnonzero((program.kind < 0) | (program.kind > JOIN))).size:
        message = f"instruction {bad[0]} has kind {program.kind[bad[0]]}, which does not exist"
        return [Diagnostic("S319", message, source=program.source)]
    if (program.kind > CELL).all():
        return [Diagnostic("S319", "no instruction computes anything", source=program.source)]
    found = _communicators(program)
    for name, wrong_rows in _field_errors(program):
        rows = np.flatnonzero(wrong_rows)

        def describe(row: int, name: str = name) -> Diagnostic:
            kind = InstructionKind(int(program.kind[row])).name
            rank = int(program.rank[row])
            text = f"{name} {getattr(program, name)[row]} is not possible in a {kind}"
            note = f"rank {rank}, instruction {row - int(start[rank])}"
            place = Label(program.spans[program.span[row]])
            return Diagnostic("S319", text, place, notes=(note,), source=program.source)

        found += table.findings(rows, describe)
    return found


def _communicators(program: Program) -> list[Diagnostic]:
    """S319: every message has a communicator, or none has one; there are no more of them than messages."""
    numbers, messages = program.communicators, int((program.kind == SEND).sum())
    if not numbers.size or (numbers.shape == (messages,) and 0 <= numbers.min() <= numbers.max() < messages):
        return []
    message = f"communicators are not one number below {messages} for each of {messages} messages"
    return [Diagnostic("S319", message, help="leave the field out for one communicator", source=program.source)]


def _field_errors(program: Program) -> list[tuple[str, Bools]]:
    kind, n = program.kind, len(program)
    limits = {
        "stage": program.stages, "microbatch": program.microbatches, "stage2": program.stages,
        "microbatch2": program.microbatches, "backward": int(PAIR_NUMBERS.max()) + 1, "peer": program.ranks,
        "channel": len(Channel), "message": 2**31, "batch": 2**31, "op": n,
        "work": len(program.works),
    }  # fmt: skip
    has = {name: np.isin(kind, kinds) for name, kinds in _FIELDS.items()}
    has |= {"stage": np.ones(n, bool), "microbatch": kind != REDUCE, "op": kind != REDUCE}
    has["microbatch"] &= ~np.isin(kind, (START, JOIN)) | (program.microbatch >= 0)
    has["batch"] = np.isin(kind, (SEND, RECV)) & (program.batch >= 0)
    has["stage2"] &= (kind != REDUCE) | (program.stage2 >= 0)
    errors = []
    for name, applies in has.items():
        column = getattr(program, name)
        errors.append((name, np.where(applies, (column < 0) | (column >= limits[name]), column != -1)))
    errors.append(("backward", (kind == CELL) & ~np.isin(program.backward, PAIR_NUMBERS)))
    errors.append(("peer", has["peer"] & (program.peer == program.rank)))
    return errors


def _computation(table: ProgramTable) -> list[Diagnostic]:
    """S2xx: everything is computed once, where its stage lives and after what it takes from the same rank."""
    schedule, _ = table.computation
    evaluation = (schedule.kind == OpKind.F).all() and len(schedule) >= schedule.stages * schedule.microbatches
    return verify(_with_backwards(schedule) if evaluation else schedule)


def _with_backwards(schedule: Schedule) -> Schedule:
    """An evaluation program's schedule with every backward at the end of its rank, last stages first: a training
    schedule that is legal if and only if the forwards are."""
    stages, microbatches = schedule.stages, schedule.microbatches
    stage = repeat(np.arange(stages, dtype=np.int32)[::-1], microbatches)
    microbatch = np.tile(np.arange(microbatches, dtype=np.int32), stages)
    home = schedule.placement.rank_of(stage, microbatch)
    by_rank = np.argsort(np.concatenate([schedule.rank, home]), kind="stable")

    def column(forwards: npt.NDArray[np.int32], backwards: npt.NDArray[np.int32] | int) -> npt.NDArray[np.int32]:
        added = np.broadcast_to(np.asarray(backwards, np.int32), stage.shape)
        return np.concatenate([forwards, added])[by_rank].astype(forwards.dtype)

    counts = bincount(home, minlength=schedule.ranks)
    return replace(
        schedule,
        rank_start=schedule.rank_start + np.concatenate([[0], np.cumsum(counts)]),
        kind=column(schedule.kind.astype(np.int32), OpKind.B).astype(np.int8),
        stage=column(schedule.stage, stage),
        microbatch=column(schedule.microbatch, microbatch),
        pair=column(schedule.pair, -1),
        phase=column(schedule.phase, 0),
        span=column(schedule.span, 0),
    )


def _cells_served(table: ProgramTable) -> list[Diagnostic]:
    """S319: the op column names the cell that an instruction serves."""
    program, (producer, consumer) = table.program, table.flows
    compute = np.flatnonzero(program.kind <= CELL)
    cell = np.full(len(program), -1)
    before = np.searchsorted(compute, program.rank_start)
    cell[compute] = np.arange(compute.size) - repeat(before[:-1], np.diff(before))
    expected = cell.copy()
    expected[table.send] = cell[producer[table.slot(table.send)]]
    expected[table.receive] = cell[consumer[table.slot(table.receive)]]
    beside = np.flatnonzero(program.work >= 0)
    rank = program.rank[beside]
    following = np.minimum(np.searchsorted(compute, beside), before[rank + 1] - 1)
    expected[beside] = cell[compute[np.maximum(following, 0)]]
    judged = program.kind != WAIT  # a wait has the op of its post: S315
    wrong = np.flatnonzero(judged & (program.op != expected))

    def describe(row: int) -> Diagnostic:
        message = f"this instruction serves cell {expected[row]} of its rank, not cell {program.op[row]}"
        return table.finding("S319", row, message)

    return table.findings(wrong, describe)


def _reductions(table: ProgramTable) -> list[Diagnostic]:
    """S318: the copies of a stage on two ranks are summed once, after their last weight gradient, in one order."""
    program = table.program
    rows = table.rows(REDUCE)[program.stage2[table.rows(REDUCE)] < 0]
    rank, stage, place = program.rank, program.stage[rows], program.placement
    schedule, op_row = table.computation
    weights = np.flatnonzero(WEIGHT[schedule.kind])
    home = place.rank_of_stage[[0, -1]]  # ranks of both copies; with one pipe twice the same
    apart = (home[0] != home[1]) & (place.pipes == 2) & (weights.size > 0)
    last = np.full(home.shape, -1)
    last[place.pipe_of_microbatch(schedule.microbatch[weights]) % 2, schedule.stage[weights]] = op_row[weights]
    copy = (home[0, stage] != rank[rows]).astype(np.int64)
    right = apart[stage] & (home[copy, stage] == rank[rows]) & (home[1 - copy, stage] == program.peer[rows])
    wrong = rows[~right | (last[copy, stage] > rows)]
    count = np.zeros(home.shape, np.int64)
    np.add.at(count, (copy[right], stage[right]), 1)

    def misplaced(row: int) -> Diagnostic:
        message = f"stage {program.stage[row]} cannot be summed here with rank {program.peer[row]}"
        help = "sum a stage with the rank of its other copy, after its last weight gradient"
        return table.finding("S318", row, message, help=help)

    findings = table.findings(wrong, misplaced)
    for pipe, of in np.argwhere(count != apart)[:SHOWN].tolist():
        message = f"rank {home[pipe, of]} sums stage {of} {count[pipe, of]} times instead of {int(apart[of])}"
        findings.append(Diagnostic("S318", message, source=program.source))
    return findings or _order_of_reductions(table)


def _order_of_reductions(table: ProgramTable) -> list[Diagnostic]:
    """S318: two ranks sum stages, then tied weights, in the same order."""
    program, rows, rank = table.program, table.rows(REDUCE), table.program.rank
    low, high = np.minimum(rank[rows], program.peer[rows]), np.maximum(rank[rows], program.peer[rows])
    order = rows[np.lexsort((rows, rank[rows], high, low))]
    sequence = np.lexsort((program.message[rows], rank[rows], high, low))
    first, second = (order[rank[order] < program.peer[order]], order[rank[order] > program.peer[order]])
    theirs = np.where(program.stage2 < 0, program.stage, program.stage2)
    unequal = first[
        (program.stage[first] != theirs[second])
        | (theirs[first] != program.stage[second])
        | (program.message[first] != program.message[second])
    ]
    unsorted = order[order != rows[sequence]]
    return table.findings(np.concatenate([unequal, unsorted])[:1], lambda row: table.finding(
        "S318", row, f"ranks {rank[row]} and {program.peer[row]} do not sum their stages in one order"))  # fmt: skip


def _runs(table: ProgramTable) -> list[Diagnostic]:
    """S310, S324: the program ends under rendezvous and in-order completion, on each of its communicators."""
    program = table.program
    stuck = find_stuck_instructions(program, table.send)
    if stuck is None:
        return []
    trail = [_link(table, link) for link in stuck.cycle]
    row = stuck.cycle[0].waits
    ranks = [rank for rank, _ in groupby(int(program.rank[link.waits]) for link in (*stuck.cycle, stuck.cycle[0]))]
    others = tuple(Label(program.spans[program.span[link.waits]], "and this one") for link in stuck.cycle[1:])
    code, queues = "S310", ""
    if program.communicators.size:
        code, queues = "S324", f" on {program.communicators.max() + 1} communicators"
    return [
        Diagnostic(
            code,
            f"{len(stuck.positions)} ranks wait for each other for ever{queues}",
            Label(program.spans[program.span[row]], "an instruction of this op waits"),
            tuple(label for label in others if label.span.line),
            ("the shortest circle: " + " <- ".join(f"rank {rank} waits" for rank in ranks), *trail),
            help="post receives before the waits that hold up their sender" + _running_assignment(table),
            source=program.source,
        )
    ]


def _running_assignment(table: ProgramTable) -> str:
    """The first assignment of communicators under which a stuck program runs, as advice; empty where none helps."""
    ends = Ends.of(table.program)
    for name in ASSIGNMENTS[1:]:
        if find_stuck_instructions(replace(table.program, communicators=ends.assigned(name)), table.send) is None:
            return f", or assign communicators by {name}"
    return ""


def _link(table: ProgramTable, link: Link) -> str:
    waits, holds = table.name(link.waits), table.name(link.holds)
    place = table.program.where(link.waits)
    if link.blocked:
        return f"rank {table.program.rank[link.waits]} stands at {waits} for {place}, before {holds}"
    return f"{holds} completes only after {waits}, for {place}"
