"""Defines the entry of the code tables."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class DiagnosticCode:
    """A diagnostic code and its explanation.

    wrong: a whole file that raises the code. right: the corrected file. The tests run both. They are empty only if no
    text can raise the code, but a command line or an edited program can; ``explanation`` then says how. file: the
    name of the file, whose suffix says its kind.
    """

    code: str
    title: str
    explanation: str
    _: KW_ONLY
    wrong: str = ""
    right: str = ""
    file: str = "example.sched"


def edit_of(file: str, code: str, title: str, explanation: str, *, wrong: str, right: str) -> DiagnosticCode:
    """A code whose right example is ``file``; the wrong one has ``wrong`` instead of the first ``right``."""
    return DiagnosticCode(code, title, explanation, wrong=file.replace(right, wrong, 1), right=file)
