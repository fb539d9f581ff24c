"""Works among replicas in programs: every form reads back, and wrong states of parameters and sums are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program
from schedc.ir.text import parse_program, print_program
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkGroup, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works, placed_in, without_works
from support.random_works import placed_under

GATHER, DROP, SCATTER, SPREAD = WorkKind.GATHER, WorkKind.DROP, WorkKind.SCATTER, WorkKind.SPREAD


@pytest.fixture(scope="module")
def program() -> Program:
    """1F1B with sharded parameters, sums over two groups, and a snapshot, of each of two stages."""
    schedule = legal_schedule(open_input("1f1b"), {"P": 2, "M": 2})
    dependencies = Dependencies.of(schedule)
    rows = [
        (kind, stage, first + shift, last + shift, group, size + stage)
        for stage in (0, 1)
        for shift in [5 * stage]
        for kind, first, last, group, size in [
            (GATHER, 0, 0, 0, 1.5), (SCATTER, 4, 4, 0, 3.5), (DROP, 4, 4, -1, 1.5), (SPREAD, 4, 4, 0, 3.5),
            (SCATTER, 4, 4, 1, 5.5), (SPREAD, 4, 4, 1, 5.5), (WorkKind.SNAPSHOT, 0, 4, -1, 7.5),
        ]
    ]  # fmt: skip
    kind, stage, start, join, group, size = (np.array(column) for column in zip(*rows, strict=True))
    microbatch = np.full(kind.size, -1)
    placed = PlacedWorks.of(kind.astype(np.int8), stage, microbatch, size, start, join, group.astype(np.int8))
    return insert_works(insert_communication(schedule, Costs(), dependencies), dependencies, placed)


def test_works_among_replicas_go_through_every_form(program: Program) -> None:
    assert verify_program(program) == []
    assert parse_program(print_program(program)) == program
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program
    text = print_program(program)
    for line in ("START gather 0 on dp #1 bytes 1.5 over replicas", "over same_experts", "JOIN drop 1 #"):
        assert line in text


@pytest.mark.parametrize(("word", "other"), [("START gather", "START teleport"), (" on dp", " on air")])
def test_an_unknown_work_in_a_text_is_refused_with_those_that_are_known(
    program: Program, word: str, other: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        parse_program(print_program(program).replace(word, other, 1))
    (finding,) = caught.value.diagnostics
    assert finding.code == "S390"
    assert finding.help is not None
    assert "works: offload, fetch, gather, drop, scatter, spread, snapshot; lanes: d2h, h2d, dp" in finding.help


def test_works_leave_a_program_and_come_back(program: Program) -> None:
    plain = without_works(program)
    schedule = legal_schedule(open_input("1f1b"), {"P": 2, "M": 2})
    assert plain == insert_communication(schedule, Costs(), Dependencies.of(schedule))
    placed = placed_in(program)
    sums = placed.of_kinds(SCATTER, SPREAD)
    others = placed.of_kinds(GATHER, DROP, WorkKind.SNAPSHOT)
    one_by_one = insert_works(plain, Dependencies.of(schedule), others)
    assert insert_works(one_by_one, Dependencies.of(schedule), sums) == program


def moved(program: Program, kind: WorkKind, half: str, to: Callable[[int], int]) -> Program:
    """The program with a row of the first work of a kind in another place; half: START or JOIN."""
    work = int(np.flatnonzero(program.works.kind == kind)[0])
    rows = np.flatnonzero(program.work == work)
    row = int(rows[0] if half == "START" else rows[1])
    order = np.delete(np.arange(len(program)), row)
    order = np.insert(order, to(row), row)
    return replace(program, **{name: getattr(program, name)[order] for name in ("kind", *EVERY_COLUMN)})


@pytest.mark.parametrize(
    ("kind", "half", "to", "message"),
    [
        (GATHER, "JOIN", lambda row: row + 3, "reads parameters that are on the way"),
        (DROP, "START", lambda row: row - 6, "reads parameters that are being dropped"),
        (SCATTER, "START", lambda row: row - 4, "sums gradients that are not complete"),
        (SPREAD, "START", lambda row: row - 6, "finds what stage 0 has"),
    ],
)
def test_a_work_in_another_place_is_refused(
    program: Program, kind: WorkKind, half: str, to: Callable[[int], int], message: str
) -> None:
    wrong = in_order(moved(program, kind, half, to))
    wrong = replace(wrong, op=np.where(wrong.work >= 0, _served(wrong), wrong.op).astype(np.int32))
    (finding,) = verify_program(wrong)
    assert (finding.code, message in finding.message) == ("S331", True), finding.message


def in_order(program: Program) -> Program:
    """The program with its works numbered in the order of their STARTs."""
    order = program.work[np.flatnonzero(program.kind == InstructionKind.START)]
    number = np.append(np.argsort(order), -1).astype(np.int32)
    return replace(program, works=program.works.only(order), work=number[program.work])


def _served(program: Program) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[n] the cell of its rank that stands next; at the end of a stream the last one."""
    computes = program.kind <= 5
    before = np.cumsum(computes) - computes
    start = np.concatenate([before, [computes.sum()]])[program.rank_start]
    return np.minimum(before - start[program.rank], (np.diff(start) - 1)[program.rank])


def test_facts_of_kinds_are_checked(program: Program) -> None:
    for column, value, message in (
        ("lane", 0, "is on the lane d2h, and its lane is dp"),
        ("group", WorkGroup.LOCAL, "is of the group local, and may be of replicas or same_experts"),
    ):
        changed = getattr(program.works, column).copy()
        changed[1] = value
        (finding,) = verify_program(replace(program, works=replace(program.works, **{column: changed})))
        assert (finding.code, message in finding.message) == ("S330", True)


@pytest.mark.parametrize(("ends", "begins"), [(DROP, "gather"), (SPREAD, "scatter"), (WorkKind.FETCH, "offload")])
def test_a_work_that_ends_another_moves_its_bytes(program: Program, ends: WorkKind, begins: str) -> None:
    if ends is WorkKind.FETCH:
        schedule = legal_schedule(open_input("1f1b"), {"P": 2, "M": 4})
        dependencies = Dependencies.of(schedule)
        placed = placed_under(dependencies, Costs(activation=1.5), 1.5, 1.0)
        program = insert_works(insert_communication(schedule, Costs(), dependencies), dependencies, placed)
    assert verify_program(program) == []
    size = program.works.bytes.copy()
    row = np.flatnonzero(program.works.kind == ends)[-1]
    size[row] += 0.25
    (finding,) = verify_program(replace(program, works=replace(program.works, bytes=size)))
    assert finding.code == "S330"
    assert finding.message.endswith(f"moves {size[row]:g} bytes, and the {begins} before it {size[row] - 0.25:g}")
