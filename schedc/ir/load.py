"""Programs from files: JSON or the text form, and nothing that could not run."""

from __future__ import annotations

from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_from_json
from schedc.ir.program import Program
from schedc.ir.text import parse_program
from schedc.ir.verify_program import verify_program


def load_program(text: str, file: str) -> Program:
    """The program in ``text``, verified. Raises DiagnosticError with everything that speaks against running it."""
    read = program_from_json if text.lstrip().startswith("{") else parse_program
    program = read(text, file)
    if findings := verify_program(program):
        raise DiagnosticError(findings)
    return program
