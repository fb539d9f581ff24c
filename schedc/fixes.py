"""The edit that mends a finding, for the findings that one edit mends: for editors, and for `schedc check --fix`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple, TypeAlias
from unicodedata import category

from schedc.diagnostics import Diagnostic
from schedc.source import NOWHERE, Source, Span

_MEANT = re.compile(r"did you mean `([^`]+)`\?")
_QUOTED = re.compile(r"`([^`]+)`")
_MOST = 1000
"""Edits of a file, which no file needs."""


class Fix(NamedTuple):
    """A text in place of a span. title: what the edit does. safe: whether it can mean nothing else."""

    span: Span
    text: str
    title: str
    safe: bool


class Mended(NamedTuple):
    """A text after edits, with the findings that the edits mended, and with the findings that stay."""

    source: Source
    done: list[Diagnostic]
    left: list[Diagnostic]


def fix_of(finding: Diagnostic) -> Fix | None:
    """The edit after which this finding is gone; None where a person has to choose."""
    if finding.source is None or finding.primary.span == NOWHERE:
        return None
    rule = _RULES.get(finding.code)
    return _spelling(finding) or (None if rule is None else rule(finding, _text(finding.source, finding.primary.span)))


def finding_json(finding: Diagnostic) -> dict[str, Any]:
    """A finding as ``--json`` prints it, with the edit that mends it, or null."""
    fix = fix_of(finding)
    if fix is None:
        return {**finding.to_json(), "fix": None}
    place = {"line": fix.span.line, "column": fix.span.column, "end_line": fix.span.end_line,
             "end_column": fix.span.end_column}  # fmt: skip
    return {**finding.to_json(), "fix": {"title": fix.title, "text": fix.text, "safe": fix.safe, **place}}


def mended(source: Source, findings: Callable[[Source], list[Diagnostic]]) -> Mended:
    """The text after all safe edits. Its findings are looked for after each edit, as one may uncover another."""
    done: list[Diagnostic] = []
    left = findings(source)
    while len(done) < _MOST:
        safe = ((each, fix) for each in left if (fix := fix_of(each)) is not None and fix.safe)
        finding, fix = next(safe, (None, None))
        if finding is None or fix is None:
            break
        done.append(finding)
        source = edited(source, fix.span, fix.text)
        left = findings(source)
    return Mended(source, done, left)


def edited(source: Source, span: Span, text: str) -> Source:
    """The source with another text in place of a span."""
    lines = source.lines
    before = [*lines[: span.line - 1], lines[span.line - 1][: span.column - 1]]
    behind = [lines[span.end_line - 1][span.end_column - 1 :], *lines[span.end_line :]]
    return replace(source, text="\n".join(before) + text + "\n".join(behind))


def finding_words(finding: Diagnostic) -> str:
    """Message, notes and help, a line each: for tools that have a place of their own for code and source."""
    help = [f"help: {finding.help}"] if finding.help else []
    return "\n".join([finding.message, *(f"note: {note}" for note in finding.notes), *help])


def _text(source: Source, span: Span) -> str:
    """The text of a span that lies on one line; empty for others."""
    return source.line(span.line)[span.column - 1 : span.end_column - 1] if span.line == span.end_line else ""


def _spelling(finding: Diagnostic) -> Fix | None:
    """The word that was meant, in place of the first one in the span that the message quotes.

    It is safe where no other word of the text is as near.
    """
    meant = _MEANT.match(finding.help)
    if meant is None or finding.source is None:
        return None
    span, text = finding.primary.span, _text(finding.source, finding.primary.span)
    quoted = [word for word in _QUOTED.findall(finding.message) if word in text]
    wrong = text if not quoted else quoted[0]
    found = re.search(rf"(?<!\w){re.escape(wrong)}(?!\w)", text)
    if not text or found is None:
        return None
    begin = span.column + found.start()
    place = Span(span.line, begin, span.line, begin + len(wrong))
    words = {*re.findall(r"\w+", finding.source.text)} - {wrong, meant[1]}
    alone = all(_likeness(wrong, other) < _likeness(wrong, meant[1]) for other in words)
    return Fix(place, meant[1], f"write `{meant[1]}`", safe=alone)


def _likeness(one: str, other: str) -> float:
    """How alike two words are but for case: 1 for the same letters."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _whole(title: str, safe: bool, replace: Callable[[Diagnostic, str], str | None]) -> _Rule:
    """A rule that gives another text for the whole span."""

    def rule(finding: Diagnostic, text: str) -> Fix | None:
        new = replace(finding, text) if text else None
        return None if new is None else Fix(finding.primary.span, new, title.format(new), safe)

    return rule


def _written(finding: Diagnostic, text: str) -> str | None:
    """What the help says to write, where it begins with the word with which the span begins."""
    first = text.split(maxsplit=1)[0]
    said = [each for each in _QUOTED.findall(finding.help) if each.split(maxsplit=1)[0] == first]
    return said[0] if said else None


def _line_out(finding: Diagnostic, text: str) -> Fix | None:
    """The whole line without its words, where nothing else stands on it."""
    assert finding.source is not None
    line = finding.source.line(finding.primary.span.line)
    if line.split("#")[0].strip() != text:
        return None
    number, lines = finding.primary.span.line, finding.source.lines
    whole = Span(number, 1, number + 1, 1) if number < len(lines) else Span(number, 1, number, len(lines[-1]) + 1)
    return Fix(whole, "", f"leave out `{text}`", safe=False)


def _closing(finding: Diagnostic, _text: str) -> Fix | None:
    """The closing brace behind the last line that is indented more than the line of the opening one."""
    assert finding.source is not None
    if "`{`" not in finding.message:
        return None
    lines, first = finding.source.lines, finding.primary.span.line
    depth = _indent(lines[first - 1])
    end = first
    for number in range(first + 1, len(lines) + 1):
        if lines[number - 1].strip():
            if _indent(lines[number - 1]) <= depth:
                break
            end = number
    code = lines[end - 1].split("#")[0].rstrip()
    place = Span(end, len(code) + 1, end, len(code) + 1)
    return Fix(place, " }", "close the block with `}`", safe=False)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _means_nothing(text: str) -> bool:
    """Whether a stray text stands for nothing: a sign by habit, or pictures."""
    return text in (";", "!", "$") or all(category(sign) == "So" for sign in text)


def _number(finding: Diagnostic, text: str) -> str | None:
    """The text with its first number replaced by the one that the help allows."""
    allowed = re.match(r"(?:allow|take a factor from) (\d+(?:\.\d+)?(?: [A-Za-z]+)?)", finding.help)
    return None if allowed is None else re.sub(r"\d+(?:\.\d+)?(?: [KMGT]i?B)?", allowed[1], text, count=1)


def _chunk_out(finding: Diagnostic, text: str) -> Fix | None:
    """The op without its chunk, on ranks that have one; bare digits only, as an index is an expression."""
    if not finding.message.startswith("`place linear`") or not text.isdigit():
        return None
    return Fix(finding.primary.span, "", "leave out the chunk", safe=True)


_Rule: TypeAlias = Callable[[Diagnostic, str], Fix | None]
_RULES: dict[str, _Rule] = {
    "S002": _whole("leave it out", True, lambda finding, text: "" if _means_nothing(text) else None),
    "S003": _closing,
    "S007": _whole("write `sched {}`", True, lambda finding, text: "1"),
    "S110": _chunk_out,
    "S116": _whole(
        "write `{}`", False, lambda finding, text: text.replace("/", "//") if "//" in finding.help else None
    ),
    "S124": _whole("write `{}`", False, _written),
    "S126": _whole("write `{}`", False, lambda finding, text: text.split(" at ")[0] if " at " in text else None),
    "S144": _line_out,
    "S146": _whole("write `{}`", False, _written),
    "S150": _whole("write `{}`", False, lambda finding, text: text.replace("by rank", "by group")),
    "S151": _whole("write `{}`", False, _written),
    "S152": _whole("write `{}`", False, _number),
    "S153": _line_out,
    "S203": _whole("write `{}`", False, lambda finding, text: "B" + text[1:] if "write B" in finding.help else None),
    "S406": _whole("write `{}`", False, _number),
}
"""By code the rule beside spelling, which concerns all codes."""
