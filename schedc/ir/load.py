"""Loads programs from files: columns, JSON or text, recognized by content. Refuses programs that cannot run."""

from __future__ import annotations

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.json import program_from_json
from schedc.ir.npz import program_from_npz
from schedc.ir.program import Program
from schedc.ir.text import parse_program
from schedc.ir.verify_program import verify_program
from schedc.source import NOWHERE, Source

_ZIP = b"PK"


def load_program(content: str | bytes, file: str) -> Program:
    """The program in the ``content`` of a file, verified.

    Raises `DiagnosticError` with everything that speaks against running the program. S390, S391 or S393: it is not the
    text form, JSON or columns. S392: it has another version. Then come the findings of `verify_program`.
    """
    program = read_program(content, file)
    if findings := verify_program(program):
        raise DiagnosticError(findings)
    return program


def read_program(content: str | bytes, file: str) -> Program:
    """`load_program` without the judgement whether the program can run."""
    if isinstance(content, bytes):
        if content.startswith(_ZIP):
            return program_from_npz(content, file)
        content = _decoded(content, file)
    read = program_from_json if content.lstrip().startswith("{") else parse_program
    return read(content, file)


def _decoded(content: bytes, file: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        message = f"neither an .npz archive nor UTF-8 text (byte {error.start})"
        help = "a program is a file that `schedc compile` wrote"
        raise DiagnosticError(
            [Diagnostic("S390", message, Label(NOWHERE), help=help, source=Source(file, ""))]
        ) from None
