"""The number of segments of a sequence in all forms of a program, and in those without."""

from __future__ import annotations

from dataclasses import replace

import pytest

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import computation
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.verify_program import verify_program


def test_segments_stand_in_every_form() -> None:
    program = schedc.compile("seq1f1b", P=2, M=2, k=4)
    assert program.segments == 4
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program
    assert parse_program(print_program(program)) == program
    order, _ = computation(program)
    assert parse_schedule(print_schedule(order)).segments == 4


def test_forms_without_segments_do_not_name_them() -> None:
    for program in (schedc.compile("1f1b", P=2, M=4), schedc.compile("seq1f1b", P=2, M=4, k=1)):
        assert '"segments":' not in program_to_json(program)
        assert "\nsegments " not in print_program(program)


def test_sequences_have_all_their_segments() -> None:
    program = replace(schedc.compile("seq1f1b", P=2, M=2, k=4), segments=3)
    assert "no whole number of sequences of 3 segments" in verify_program(program)[0].message
    with pytest.raises(DiagnosticError, match="not in 2"):
        program_from_json(program_to_json(program).replace('"segments": 3', '"segments": 1'))
