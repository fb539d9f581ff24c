"""What the text forms of Schedule and Program share: lines, errors at their place, and the header above the ops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
_LARGEST = 2**31 - 1


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
    name: str | None = None
    doc: list[str] = field(default_factory=list)
    source: str = ""
    layout: str = ""
    layers: int = 0
    plan: str = ""
    tied: list[Tie] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: int = 0
    pipes: list[list[int]] = field(default_factory=list)
    first_microbatch: list[int] = field(default_factory=lambda: [0])
    phases: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    works: dict[int, tuple[HeaderLine, WorkRow]] = field(default_factory=dict)
    """The works by number, with the lines of their STARTs."""
    joined: list[tuple[HeaderLine, int, WorkKind]] = field(default_factory=list)
    """The line of each JOIN, and the number and kind of the work that it names."""

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

    def placement(self) -> Placement:
        return Placement(np.array(self.pipes, np.int32), tuple(self.first_microbatch), self.ranks)

    def common(self) -> dict[str, Any]:
        """The fields that Schedule and Program have in common."""
        return {
            "name": self.name,
            "sizes": self.sizes,
            "placement": self.placement(),
            "phases": tuple(self.phases),
            "spans": tuple(self.spans),
            "doc": "\n".join(self.doc),
            "layout": self.layout,
            "layers": self.layers,
            "plan": plan_of_line(self.plan, len(self.pipes[0])) if self.plan else NO_PLAN,
            "tied": tuple(self.tied),
        }


def print_header(form: str, value: Schedule | Program, version: int = VERSION) -> list[str]:
    """The lines of the header; ``form`` is ``schedule`` or ``program``."""
    place = value.placement
    lines = [f"{form} {version}", f"name {json.dumps(value.name)}"]
    lines += [f"doc {json.dumps(line)}" for line in value.doc.split("\n")] if value.doc else []
    lines += [f"source {json.dumps(value.source_name)}"] if isinstance(value, Program) else []
    lines += [f"layout {json.dumps(value.layout)} of {value.layers}"] if value.layout else []
    lines += [f"plan {json.dumps(plan_line(value.plan))}"] if value.plan != NO_PLAN else []
    lines += [f"tied {' '.join(map(str, tie.stages))} bytes {tie.bytes}" for tie in value.tied]
    lines += [f"size {json.dumps(name)} {number}" for name, number in value.sizes.items()]
    lines.append(f"ranks {place.ranks}")
    for pipe, home in enumerate(place.rank_of_stage.tolist()):
        low, high = place.first_microbatch[pipe : pipe + 2]
        lines.append(f"pipe {low} ..< {high} on {' '.join(map(str, home))}")
    lines += [f"phase {i} {json.dumps(name)}" for i, name in enumerate(value.phases)]
    lines += [f"span {i} {s.line}:{s.column}-{s.end_line}:{s.end_column}" for i, s in enumerate(value.spans)]
    return lines


def read_header(form: str, source: Source) -> tuple[Header, HeaderLine | None, Iterator[HeaderLine]]:
    """The header, the first line behind it (``rank 0``), and the lines behind that one."""
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
        line.fail(f"version {first[2]} is not one that this schedc reads ({readable})", code="S392",
                  help="write it again with this schedc")  # fmt: skip
    header = Header(line, int(first[2]))
    for line in lines:
        keyword, _, rest = line.text.partition(" ")
        if keyword == "rank":
            break
        if keyword not in _FIELDS or (keyword == "source" and form == "schedule"):
            line.fail(f"unknown field `{keyword[:40]}`", 0, len(keyword), help=did_you_mean(keyword, _FIELDS))
        pattern, read = _FIELDS[keyword]
        match = re.fullmatch(pattern, line.text, re.ASCII)
        if match is None:
            line.fail(f"`{keyword}` is followed by something else here", len(keyword) + 1 if rest else 0)
        read(header, line, match)
    else:
        line = None
    _check_header(header, line or HeaderLine(source, len(source.lines), 1, ""))
    return header, line, lines


def _check_header(header: Header, line: HeaderLine) -> None:
    missing = [
        what
        for what, there in (
            ("name", header.name is not None), ("ranks", header.ranks), ("pipe", header.pipes),
            ("phase", header.phases), ("span", header.spans),
        ) if not there
    ]  # fmt: skip
    if missing:
        line.fail(f"the header has no `{missing[0]}`")


def _string(line: HeaderLine, match: re.Match[str], group: int) -> str:
    try:
        value = json.loads(match[group])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        line.fail("a string in double quotes is expected", match.start(group), len(match[group]))
    return value


def _read_name(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.name = _string(line, match, 1)


def _read_doc(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.doc.append(_string(line, match, 1))


def _read_source(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.source = _string(line, match, 1)


def _read_layout(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.layout = _string(line, match, 1)
    header.layers = line.number_at(match[2], match.start(2), 2**20)


def _read_plan(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.plan = _string(line, match, 1)


def _read_tied(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    stages = [line.number_at(word[0], match.start(1) + word.start()) for word in re.finditer(r"\d+", match[1])]
    header.tied.append(Tie(tuple(stages), _long_number(line, match, 2)))


def _long_number(line: HeaderLine, match: re.Match[str], group: int) -> int:
    """A number of up to 18 digits, as of bytes."""
    if len(match[group]) > 18:
        line.fail(f"{match[group][:20]} is too large (18 digits at most)", match.start(group), len(match[group]))
    return int(match[group])


def _read_size(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    name = _string(line, match, 1)
    if name in header.sizes:
        line.fail(f"size {json.dumps(name)} is given twice", match.start(1), len(match[1]))
    if len(match[2]) > 18:
        line.fail("this size is too large", match.start(2), len(match[2]))
    header.sizes[name] = int(match[2])


def _read_ranks(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    header.ranks = line.number_at(match[1], match.start(1), 2**20)


def _read_pipe(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    low, high = (line.number_at(match[group], match.start(group)) for group in (1, 2))
    if low != header.first_microbatch[-1] or high <= low:
        line.fail(f"the microbatches of this pipe begin at {header.first_microbatch[-1]}, and there are some",
                  match.start(1), match.end(2) - match.start(1))  # fmt: skip
    home = [line.number_at(word[0], match.start(3) + word.start()) for word in re.finditer(r"\d+", match[3])]
    if header.pipes and len(home) != len(header.pipes[0]):
        line.fail(f"this pipe has {len(home)} stages, the first {len(header.pipes[0])}", match.start(3))
    if outside := [rank for rank in home if rank >= header.ranks]:
        line.fail(f"rank {outside[0]} does not exist: there are {header.ranks}", match.start(3))
    header.pipes.append(home)
    header.first_microbatch.append(high)


def _read_phase(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    _check_next(line, match, len(header.phases))
    header.phases.append(_string(line, match, 2))


def _read_span(header: Header, line: HeaderLine, match: re.Match[str]) -> None:
    _check_next(line, match, len(header.spans))
    header.spans.append(Span(*(line.number_at(match[group], match.start(group)) for group in (2, 3, 4, 5))))


def _check_next(line: HeaderLine, match: re.Match[str], expected: int) -> None:
    if line.number_at(match[1], match.start(1)) != expected:
        line.fail(f"number {expected} is expected here", match.start(1), len(match[1]))


_FIELDS: dict[str, tuple[str, Callable[[Header, HeaderLine, re.Match[str]], None]]] = {
    "name": (r"name (\".*\")", _read_name),
    "doc": (r"doc (\".*\")", _read_doc),
    "source": (r"source (\".*\")", _read_source),
    "layout": (r"layout (\".+\") of ([1-9]\d*)", _read_layout),
    "plan": (r"plan (\".+\")", _read_plan),
    "tied": (r"tied (\d+(?: \d+)*) bytes (\d+)", _read_tied),
    "size": (r"size (\".*\") (-?\d+)", _read_size),
    "ranks": (r"ranks ([1-9]\d*)", _read_ranks),
    "pipe": (r"pipe (\d+) \.\.< (\d+) on (\d+(?: \d+)*)", _read_pipe),
    "phase": (r"phase (\d+) (\".*\")", _read_phase),
    "span": (r"span (\d+) (\d+):(\d+)-(\d+):(\d+)", _read_span),
}
"""Form and reader of each line of the header."""
