"""Programs into files: which forms there are, and which of them fits the size of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from schedc.ir.json import program_to_json
from schedc.ir.npz import program_to_npz
from schedc.ir.program import Program
from schedc.ir.text import print_program


@dataclass(frozen=True)
class FileForm:
    """What a form of programs is for, the name of its file, and what the file holds."""

    purpose: str
    file: str
    content: Callable[[Program], bytes]


FORMS: Mapping[str, FileForm] = {
    "json": FileForm("JSON, for other tools", "program.json", lambda program: program_to_json(program).encode()),
    "text": FileForm("to read and to compare", "program.txt", lambda program: print_program(program).encode()),
    "npz": FileForm("compressed columns, for any size", "program.npz", program_to_npz),
}
"""The forms of programs; the runtime loads each of them (`schedc.ir.load`)."""

SMALL = 100_000
"""Instructions up to which a program is written as JSON and text, some 5 MB each. A larger one is written as columns,
which take a fifteenth of that and less time than either."""


def forms_of(program: Program) -> tuple[str, ...]:
    """The forms in which a program is written where none is asked for."""
    return ("json", "text") if len(program) <= SMALL else ("npz",)


def form_of(program: Program) -> FileForm:
    """The form that other processes load at the program's size."""
    return FORMS[forms_of(program)[0]]


def save_program(program: Program, folder: Path) -> Path:
    """Writes the program in the form that other processes load; gives the file."""
    form = form_of(program)
    path = folder / form.file
    path.write_bytes(form.content(program))
    return path
