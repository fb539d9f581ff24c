"""The shape of one entry of the code tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiagnosticCode:
    """A diagnostic code. ``wrong`` is a whole file that raises it; ``right`` is the same file mended.

    Both are run by the tests. They are empty only where no `.sched` text can raise the code
    (a bad command line, an edited program); ``explanation`` then says how it comes about.
    """

    code: str
    title: str
    explanation: str
    wrong: str = ""
    right: str = ""
