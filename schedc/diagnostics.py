"""What a user did wrong (`Diagnostic`) and what we did wrong (`CompilerBug`): two different trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from schedc.source import NOWHERE, Source, Span


@dataclass(frozen=True)
class Label:
    """A place and what is to be said about it."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Diagnostic:
    """One finding about the user's input.

    ``code`` is a key of `schedc.codes.CODES`. The primary label is underlined with ``^``, the others
    with ``-``. ``notes`` explain (a counterexample, the trail of a cycle); ``help`` says what to do.
    """

    code: str
    message: str
    primary: Label = Label(NOWHERE)
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    source: Source | None = field(default=None, compare=False, repr=False)

    @property
    def position(self) -> tuple[str, int, int]:
        """(code, line, column): what tests compare."""
        return (self.code, self.primary.span.line, self.primary.span.column)

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "file": self.source.place if self.source else None,
            "line": self.primary.span.line,
            "column": self.primary.span.column,
            "end_line": self.primary.span.end_line,
            "end_column": self.primary.span.end_column,
            "notes": list(self.notes),
            "help": self.help,
        }


class DiagnosticError(Exception):
    """The input cannot be compiled; carries every diagnostic found in this run."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n\n".join(render(d) for d in self.diagnostics))


class RequestError(DiagnosticError):
    """What was asked for does not exist: a schedule, a size, a cost, a range. No text that was read is at fault."""


class CompilerBug(Exception):
    """An invariant of ours does not hold. Names the pass; ``dump`` is the IR at that point, as text."""

    def __init__(self, where: str, message: str, dump: str = "") -> None:
        self.where, self.dump = where, dump
        super().__init__(f"bug in {where}: {message} (this is a fault of schedc, not of your file)")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A help text that offers the nearest of ``known``, or lists them when there are few; else empty.

    A name that differs only in case is nearer than all others.
    """
    names = sorted(set(known))
    if alike := [other for other in names if other.lower() == name.lower()]:
        return f"did you mean `{alike[0]}`?"
    if close := get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean `{close[0]}`?"
    return f"known here: {', '.join(names)}" if 0 < len(names) <= 12 else ""


Paint: TypeAlias = Callable[[str, str], str]
"""Colours a text by its role: error, message, gutter, mark (of the primary place), other (of another one), help."""


def plain(_role: str, text: str) -> str:
    """The `Paint` of places without colours."""
    return text


def render(diagnostic: Diagnostic, paint: Paint = plain) -> str:
    """The diagnostic as text: message, file and line, the source lines with carets, notes, help."""
    lines = [f"{paint('error', f'error[{diagnostic.code}]')}{paint('message', f': {clean(diagnostic.message)}')}"]
    lines += _excerpt(diagnostic, paint)
    lines += [f"  {paint('gutter', '=')} {paint('message', 'note')}: {clean(note)}" for note in diagnostic.notes]
    if diagnostic.help:
        lines.append(f"  {paint('gutter', '=')} {paint('help', 'help')}: {clean(diagnostic.help)}")
    return "\n".join(lines)


def _excerpt(diagnostic: Diagnostic, paint: Paint) -> list[str]:
    source, primary = diagnostic.source, diagnostic.primary
    if source is None or primary.span == NOWHERE:
        return [f"  {paint('gutter', '-->')} {clean(source.place)}"] if source else []
    labels = sorted(
        [(primary, "^"), *((label, "-") for label in diagnostic.secondary if label.span != NOWHERE)],
        key=lambda item: item[0].span,
    )
    width = len(str(max(label.span.line for label, _ in labels)))
    gutter = " " * width
    bar = paint("gutter", f"{gutter} |")
    out = [f"{gutter}{paint('gutter', '-->')} {clean(source.place)}:{primary.span}", bar]
    previous = 0
    for label, mark in labels:
        span = label.span
        if span.line != previous:
            if previous and span.line > previous + 1:
                out.append(paint("gutter", f"{gutter} …"))
            out.append(f"{paint('gutter', f'{span.line:>{width}} |')} {_window(source.line(span.line))}")
            previous = span.line
        indent, marks = _underline(source.line(span.line), span, mark)
        said = f"{marks} {clean(label.text)}".rstrip()
        out.append(f"{bar} {indent}{paint('mark' if mark == '^' else 'other', said)}")
    out.append(bar)
    return out


_WIDEST = 160


def _window(line: str) -> str:
    shown = clean(line.replace("\t", " "))
    return shown if len(shown) <= _WIDEST else shown[:_WIDEST] + "…"


def _underline(line: str, span: Span, mark: str) -> tuple[str, str]:
    """Spaces up to the span, and the marks below it."""
    start = min(span.column - 1, _WIDEST)
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    return " " * start, mark * max(1, min(end, _WIDEST) - start)


def clean(text: str) -> str:
    """``text`` with control characters made visible, so that a hostile name cannot drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
