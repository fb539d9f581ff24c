"""Files and places in them: what every diagnostic, op and instruction can point back to."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of a source text. Lines and columns count from 1."""

    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.line, self.column, other.end_line, other.end_column)


def first_sentence(text: str) -> str:
    """The first sentence of a documentation text, on one line: what titles a drawing and an entry of a list."""
    head, stop, _ = " ".join(text.split()).partition(". ")
    return head + stop.strip()


NOWHERE = Span(0, 0, 0, 0)
"""The span of things that no source text wrote (an imported order, a schedule built by a test)."""


@dataclass(frozen=True)
class Source:
    """A named text.

    name: the path as the user gave it; of a file that ships with schedc its bare name, which programs keep.
    path: where the file is, if that is not its name.
    """

    name: str
    text: str
    path: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """What diagnostics print: a path that the user can open, or a name that says what the text is."""
        return self.path or self.name

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.text.split("\n"))

    @cached_property
    def _line_starts(self) -> tuple[int, ...]:
        starts = [0]
        for line in self.lines[:-1]:
            starts.append(starts[-1] + len(line) + 1)
        return tuple(starts)

    def line(self, number: int) -> str:
        """The text of line ``number`` (from 1) without its newline; empty outside the file."""
        return self.lines[number - 1].rstrip("\r") if 1 <= number <= len(self.lines) else ""

    def text_at(self, span: Span) -> str:
        """The text of ``span`` on one line."""
        lines = [self.line(number) for number in range(span.line, span.end_line + 1)]
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return " ".join(" ".join(lines).split())

    def span_at(self, start: int, end: int) -> Span:
        """The span of the characters ``start`` to ``end`` (offsets from 0, half-open)."""
        first = bisect_right(self._line_starts, start) - 1
        last = bisect_right(self._line_starts, end) - 1
        return Span(first + 1, start - self._line_starts[first] + 1, last + 1, end - self._line_starts[last] + 1)
