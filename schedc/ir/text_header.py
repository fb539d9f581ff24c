"""What the text forms of Schedule and Program share: lines, errors at their place, and the header above the ops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.placement import Placement
from schedc.ir.plan import NO_PLAN
from schedc.ir.plan_text import plan_line, plan_of_line
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.ties import Tie
from schedc.ir.works import FACTS, WorkKind, WorkRow, Works
from schedc.source import Source, Span

VERSION, WITH_WORKS = 1, 2
"""Versions of the forms: that of a value without works, and that of a program with works."""
_LARGEST, _MOST = 2**31 - 1, 2**20
"""The largest number of a line, and the most ranks or layers."""


_LISTS: tuple[str, ...] = ("doc", "tied", "pipe", "phase", "span")
"""Keywords of lines that may occur several times, beside ``size``."""


@dataclass(frozen=True)
class HeaderLine:
    """One line that says something: its number, the column where ``text`` begins, and the text without its margins."""

    source: Source
    number: int
    column: int
    text: str

    def fail(self, message: str, start: int = 0, length: int = 0, code: str = "S390", help: str = "") -> NoReturn:
        """Raises the diagnostic for ``length`` characters from ``start`` of the text (0: the rest of the line)."""
        first = self.column + start
        span = Span(self.number, first, self.number, first + max(1, length or len(self.text) - start))
        raise DiagnosticError([Diagnostic(code, message, Label(span, "here"), help=help, source=self.source)])

    def number_at(self, digits: str, start: int, limit: int = _LARGEST) -> int:
        if len(digits) > 10 or int(digits) > limit:
            self.fail(f"{digits[:20]} is too large (at most {limit})", start, len(digits))
        return int(digits)


def lines_of(source: Source) -> Iterator[HeaderLine]:
    """The lines of a text without comment lines and empty ones."""
    for number, text in enumerate(source.lines, 1):
        stripped = text.strip()
        if stripped and not stripped.startswith("#"):
            yield HeaderLine(source, number, len(text) - len(text.lstrip()) + 1, stripped)


@dataclass
class Header:
    """Everything of a Schedule or Program but the ops, while it is read. opening: the line with form and version."""

    opening: HeaderLine
    version: int
    fields: dict[str, Any] = field(
        default_factory=lambda: {"layout": "", "layers": 0, "segments": 1, "source": "", "sizes": {}}
    )
    """What lines said once, by keyword."""
    lines: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _LISTS})
    """What lines said that may occur several times, by keyword."""
    works: dict[int, tuple[HeaderLine, WorkRow]] = field(default_factory=dict)
    """The works by number, with the lines of their STARTs."""
    joined: list[tuple[HeaderLine, int, WorkKind]] = field(default_factory=list)
    """The line of each JOIN, and the number and kind of the work that it names."""

    @property
    def ranks(self) -> int:
        ranks: int = self.fields["ranks"]
        return ranks

    def table_of_works(self) -> Works:
        """The works by number. Fails at a JOIN of nothing or of another kind, and at a number that is too large.

        Fails at the version where works contradict it.
        """
        for line, number, kind in self.joined:
            if number not in self.works:
                line.fail(f"work {number} is started nowhere")
            if self.works[number][1].kind is not kind:
                line.fail(f"work {number} is started as {FACTS[self.works[number][1].kind].name}")
        for number, (line, _) in self.works.items():
            if number >= len(self.works):
                line.fail(f"{len(self.works)} works are numbered from 0, and this one is {number}")
        if bool(self.works) != (self.version == WITH_WORKS):
            self.opening.fail(f"version {WITH_WORKS} has works, and version {VERSION} has none")
        return Works.of(self.works[number][1] for number in range(len(self.works)))

    def common(self) -> dict[str, Any]:
        """The fields that Schedule and Program have in common."""
        pipes, phases, spans, docs, ties = (self.lines[name] for name in ("pipe", "phase", "span", "doc", "tied"))
        first = (0, *(high for _, high, _ in pipes))
        plan = self.fields.get("plan")
        return {
            "placement": Placement(np.array([home for *_, home in pipes], np.int32), first, self.ranks),
            "phases": tuple(name for _, name in phases),
            "spans": tuple(Span(*place) for _, *place in spans),
            "doc": "\n".join(text for (text,) in docs),
            "tied": tuple(Tie(tuple(stages), size) for stages, size in ties),
            "plan": plan_of_line(plan, len(pipes[0][-1])) if plan else NO_PLAN,
            **{name: self.fields[name] for name in ("name", "layout", "layers", "segments", "sizes")},
        }

    def take(self, line: HeaderLine, keyword: str, values: list[Any], match: re.Match[str]) -> None:
        """Keeps the values of a line. Fails where the line contradicts an earlier one."""
        if fault := self._fault(keyword, values):
            line.fail(fault[0], match.start(fault[1]))
        if keyword in _LISTS:
            self.lines[keyword].append(values)
        elif keyword == "size":
            self.fields["sizes"][values[0]] = values[1]
        elif keyword == "layout":
            self.fields |= {"layout": values[0], "layers": values[1]}
        else:
            (self.fields[keyword],) = values

    def _fault(self, keyword: str, values: list[Any]) -> tuple[str, int] | None:
        """(message, group of the pattern) for what is wrong with a line."""
        if keyword in ("phase", "span") and values[0] != (expected := len(self.lines[keyword])):
            return f"number {expected} is expected here", 1
        if keyword == "size" and values[0] in self.fields["sizes"]:
            return f"size {json.dumps(values[0])} is given twice", 1
        if keyword in ("layout", "plan") and not values[0]:
            return f"an empty {keyword}", 1
        if keyword in ("layout", "ranks") and not 1 <= values[-1] <= _MOST:
            return f"a number from 1 to {_MOST} is expected, not {values[-1]}", len(values)
        return self._fault_of_pipe(*values) if keyword == "pipe" else None

    def _fault_of_pipe(self, low: int, high: int, home: list[int]) -> tuple[str, int] | None:
        pipes = self.lines["pipe"]
        begin = pipes[-1][1] if pipes else 0
        if low != begin or high <= low:
            return f"the microbatches of this pipe begin at {begin}, and there are some", 1
        if pipes and len(home) != len(pipes[0][-1]):
            return f"this pipe has {len(home)} stages, the first {len(pipes[0][-1])}", 3
        ranks = self.fields.get("ranks", 0)
        outside = [rank for rank in home if rank >= ranks]
        return (f"rank {outside[0]} does not exist: there are {ranks}", 3) if outside else None


def print_header(form: str, value: Schedule | Program, version: int = VERSION) -> list[str]:
    """The lines of the header; ``form`` is ``schedule`` or ``program``."""
    place = value.placement
    lines = [f"{form} {version}", f"name {json.dumps(value.name)}"]
    lines += [f"doc {json.dumps(line)}" for line in value.doc.split("\n")] if value.doc else []
    lines += [f"source {json.dumps(value.source_name)}"] if isinstance(value, Program) else []
    lines += [f"layout {json.dumps(value.layout)} of {value.layers}"] if value.layout else []
    lines += [f"plan {json.dumps(plan_line(value.plan))}"] if value.plan != NO_PLAN else []
    queues = value.communicators.tolist() if isinstance(value, Program) else []
    lines += [f"communicators {' '.join(map(str, queues))}"] if queues else []
    lines += [f"tied {' '.join(map(str, tie.stages))} bytes {tie.bytes}" for tie in value.tied]
    lines += [f"segments {value.segments}"] if value.segments > 1 else []
    lines += [f"size {json.dumps(name)} {number}" for name, number in value.sizes.items()]
    lines.append(f"ranks {place.ranks}")
    for pipe, home in enumerate(place.rank_of_stage.tolist()):
        low, high = place.first_microbatch[pipe : pipe + 2]
        lines.append(f"pipe {low} ..< {high} on {' '.join(map(str, home))}")
    lines += [f"phase {i} {json.dumps(name)}" for i, name in enumerate(value.phases)]
    lines += [f"span {i} {s.line}:{s.column}-{s.end_line}:{s.end_column}" for i, s in enumerate(value.spans)]
    return lines


def read_header(form: str, source: Source) -> tuple[Header, Iterator[HeaderLine]]:
    """The header, and the lines behind it, the first of which is ``rank 0``."""
    lines = lines_of(source)
    line = next(lines, None)
    if line is None:
        HeaderLine(source, 1, 1, "").fail(f"`{form} {VERSION}` is expected: there is nothing here")
    first = re.fullmatch(r"(schedule|program) (\d{1,9})", line.text)
    if first is None or first[1] != form:
        line.fail(f"`{form} {VERSION}` is expected at the beginning", code="S392")
    versions = (VERSION, WITH_WORKS) if form == "program" else (VERSION,)
    if int(first[2]) not in versions:
        readable = " and ".join(map(str, versions))
        line.fail(f"version {first[2]} is unknown: this schedc reads {readable}", code="S392",
                  help="write the file again with this schedc")  # fmt: skip
    header, behind = Header(line, int(first[2])), HeaderLine(source, len(source.lines), 1, "")
    for line in lines:
        keyword, _, rest = line.text.partition(" ")
        if keyword == "rank":
            behind, lines = line, chain([line], lines)
            break
        if keyword not in _FIELDS or (keyword in ("source", "communicators") and form == "schedule"):
            line.fail(f"unknown field `{keyword[:40]}`", 0, len(keyword), help=did_you_mean(keyword, _FIELDS))
        pattern, kinds = _FIELDS[keyword]
        match = pattern.fullmatch(line.text)
        if match is None:
            line.fail(f"`{keyword}` is followed by something else here", len(keyword) + 1 if rest else 0)
        header.take(line, keyword, [_GROUPS[kind][1](line, match, at) for at, kind in enumerate(kinds, 1)], match)
    there = {*header.fields, *(name for name, found in header.lines.items() if found)}
    if missing := [name for name in ("name", "ranks", "pipe", "phase", "span") if name not in there]:
        behind.fail(f"the header has no `{missing[0]}`")
    return header, lines


def _text(line: HeaderLine, match: re.Match[str], group: int) -> str:
    try:
        value = json.loads(match[group])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        line.fail("a string in double quotes is expected", match.start(group), len(match[group]))
    return value


def _number(line: HeaderLine, match: re.Match[str], group: int) -> int:
    return line.number_at(match[group], match.start(group))


def _long(line: HeaderLine, match: re.Match[str], group: int) -> int:
    """A number of up to 18 digits, as of bytes."""
    if len(match[group]) > 18:
        line.fail(f"{match[group][:20]} is too large (18 digits at most)", match.start(group), len(match[group]))
    return int(match[group])


def _numbers(line: HeaderLine, match: re.Match[str], group: int) -> list[int]:
    return [line.number_at(word[0], match.start(group) + word.start()) for word in re.finditer(r"\d+", match[group])]


_GROUPS: dict[str, tuple[str, Callable[[HeaderLine, re.Match[str], int], Any]]] = {
    "TEXT": (r'(".*")', _text), "N": (r"(\d+)", _number), "BYTES": (r"(\d+)", _long), "SIZE": (r"(-?\d+)", _long),
    "LIST": (r"(\d+(?: \d+)*)", _numbers),
}  # fmt: skip
"""Words that stand for a value in a line: the pattern of the value, and its reader."""


def _form(line: str) -> tuple[re.Pattern[str], list[str]]:
    pieces = re.split(rf"\b({'|'.join(_GROUPS)})\b", line)
    pattern = "".join(_GROUPS[piece][0] if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
    return re.compile(pattern, re.ASCII), pieces[1::2]


_LINES = (
    "name TEXT", "doc TEXT", "source TEXT", "layout TEXT of N", "plan TEXT", "communicators LIST",
    "tied LIST bytes BYTES", "segments N", "size TEXT SIZE", "ranks N", "pipe N ..< N on LIST", "phase N TEXT",
    "span N N:N-N:N",
)  # fmt: skip
_FIELDS = {line.partition(" ")[0]: _form(line) for line in _LINES}
"""The form of each line of the header, and what stands in it, by its first word."""
