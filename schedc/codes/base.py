"""Defines the entry of the code tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiagnosticCode:
    """A diagnostic code and its explanation.

    wrong: a whole file that raises the code. right: the corrected file. The tests run both. They are empty only if no
    text can raise the code, but a command line or an edited program can; ``explanation`` then says how. file: what such
    a file is named; its suffix says what it is.
    """

    code: str
    title: str
    explanation: str
    wrong: str = ""
    right: str = ""
    file: str = "example.sched"
