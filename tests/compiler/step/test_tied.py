"""Tied weights in programs: places of sums, in every form, and damage, which is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedc.compiler import compile as compile_schedule
from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.load import load_program
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.text import parse_program, print_program
from schedc.ir.ties import Tie
from schedc.ir.verify_program import verify_program
from schedc.step.program.forward_only import forward_only
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.tied import with_tied

REDUCE = InstructionKind.REDUCE


def lines(program: Program) -> list[str]:
    """The REDUCEs of all ranks, rank by rank, as the text form writes them."""
    return [line.split(" | ")[0].strip() for line in print_program(program).splitlines() if "REDUCE" in line]


CASES: list[tuple[str, tuple[Tie, ...], list[str]]] = [
    ("1f1b", (Tie((0, 3), 4096),), ["REDUCE 0 tied to 3 with 3 #0", "REDUCE 3 tied to 0 with 0 #0"]),
    (
        "interleaved_1f1b",  # ranks 0 and 3 hold two stages each of the second tie, and one copy
        (Tie((0, 7), 8), Tie((0, 3, 4, 7), 8)),
        [
            "REDUCE 0 tied to 7 with 3 #0", "REDUCE 0 tied to 3 with 3 #1",
            "REDUCE 7 tied to 0 with 0 #0", "REDUCE 3 tied to 0 with 0 #1",
        ],
    ),
    (
        "zbh1",
        (Tie((0, 1, 3)),),
        [
            "REDUCE 0 tied to 1 with 1 #0", "REDUCE 0 tied to 3 with 3 #0", "REDUCE 1 tied to 0 with 0 #0",
            "REDUCE 1 tied to 3 with 3 #0", "REDUCE 3 tied to 0 with 0 #0", "REDUCE 3 tied to 1 with 1 #0",
        ],
    ),
    ("zbv", (Tie((0, 7), 8),), []),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "ties", "expected"), CASES)
def test_every_two_copies_exchange_their_gradients_at_the_end(
    schedule: str, ties: tuple[Tie, ...], expected: list[str]
) -> None:
    plain = compile_schedule(schedule, P=4, M=8)
    program = with_tied(plain, ties)
    assert lines(program) == expected
    assert verify_program(program) == []
    assert with_tied(program, ()) == plain
    assert with_tied(program, ties) is program
    sums = [line for line in print_program(program).splitlines() if "REDUCE" in line or line.startswith("rank")]
    assert len(sums) == len(expected) + 5  # `ranks 4` and a line for each rank
    for end in program.rank_start[1:]:
        kinds = program.kind[end - 3 : end] == REDUCE
        assert np.all(kinds[np.argmax(kinds) :]) or not kinds.any()  # nothing comes behind


@pytest.mark.parametrize(("schedule", "ties", "expected"), CASES)
def test_other_passes_and_all_forms_keep_ties(schedule: str, ties: tuple[Tie, ...], expected: list[str]) -> None:
    program = with_tied(compile_schedule(schedule, P=4, M=8), ties)
    again = insert_communication(computation(program)[0])
    assert (again.tied, lines(again), verify_program(again)) == (ties, expected, [])
    evaluation = forward_only(program)
    assert (evaluation.tied, lines(evaluation), verify_program(evaluation)) == (ties, [], [])
    assert parse_program(print_program(program)) == program
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program


def test_two_pipes_need_ties_that_share_both_ranks() -> None:
    program = compile_schedule("dualpipe", P=4, M=8)
    assert lines(with_tied(program, [Tie((0, 3), 1)])) == lines(program)
    for tie in (Tie((0, 1)), Tie((0, 2, 3))):
        with pytest.raises(DiagnosticError) as error:
            with_tied(program, [tie])
        assert [diagnostic.code for diagnostic in error.value.diagnostics] == ["S303"]


def damaged(program: Program, **columns: Any) -> list[str]:
    """The codes of what is wrong when a rank's last row has other values."""
    row = int(program.rank_start[1]) - 1
    changed = {name: getattr(program, name).copy() for name in columns}
    for name, value in columns.items():
        changed[name][row] = value
    return sorted({diagnostic.code for diagnostic in verify_program(replace(program, **changed))})


def test_damage_is_found() -> None:
    program = with_tied(compile_schedule("1f1b", P=4, M=4), [Tie((0, 3), 8)])
    assert damaged(program, stage2=2) == ["S318"]
    assert damaged(program, stage2=-1) == ["S318"]
    assert damaged(program, stage2=4) == ["S319"]
    assert damaged(program, peer=1) == ["S318"]
    assert damaged(program, message=1) == ["S318"]
    for stages in ((0,), (3, 0), (0, 4), (0, 0)):
        assert {d.code for d in verify_program(replace(program, tied=(Tie(stages),)))} == {"S303"}
    assert {d.code for d in verify_program(replace(program, tied=()))} == {"S318"}
    moved = print_program(program).splitlines()
    row = next(i for i, line in enumerate(moved) if "REDUCE" in line)
    moved.insert(row - 1, moved.pop(row))  # before the last backward
    with pytest.raises(DiagnosticError, match="not complete here"):
        load_program("\n".join(moved), "moved")


def test_headers_with_ties_that_are_none() -> None:
    text = print_program(with_tied(compile_schedule("1f1b", P=2, M=2), [Tie((0, 1), 8)]))
    json = program_to_json(parse_program(text))
    for wrong in ("tied 0 1", "tied bytes 8", f"tied 0 1 bytes {10**19}", "tied 0 99999999999 bytes 8"):
        with pytest.raises(DiagnosticError):
            parse_program(text.replace("tied 0 1 bytes 8", wrong))
    for wrong in ('"tied": 1', '"tied": [{"bytes": 8}]', '"tied": [{"stages": [0, -1], "bytes": 8}]'):
        with pytest.raises(DiagnosticError):
            program_from_json(json.replace('"tied": [{"stages":[0,1],"bytes":8}]', wrong))
    assert '"tied": [{"stages":[0,1],"bytes":8}]' in json
