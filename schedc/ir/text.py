"""Schedules and programs as text: line by line, to read and to compare; each parses back to an equal value.

A text begins with its form and version, ``schedule 1`` or ``program 1``. The header gives name, sizes, the placement
(for each pipe its microbatches, and the rank of each stage) and the tables of phases and spans. Then, for each rank,

* a schedule has lines ``<phase>: <op> <op> ...``. An op is written as in torch's CSV, ``0F3``; ``@n`` changes the
  span from this op on (in this line). An overlapped pair is ``(3F4;2B1)``. Its number follows as ``&n`` where that is
  not how many pairs come before it. A lone op with a pair number, which no legal schedule has, is ``0F3&n``.
* a program has one instruction per line, ``<instruction> | <op> <phase>@<span>``: ``0F3``, ``(3F4;2B1)``,
  ``SEND 0A3 to 1 #17 batch 4``, ``RECV 6G1 from 1 #23``, ``WAIT 0A3 with 1 #17``, ``REDUCE 3 with 2 #0``,
  ``REDUCE 0 tied to 7 with 3 #0``, ``START offload 0A3 on d2h #5 bytes 1048576``, ``JOIN offload 0A3 #5``,
  ``START gather 0 on dp #6 bytes 1048576 over replicas``, ``JOIN gather 0 #6``.
  A is an activation, G a gradient, ``#`` the number of the message or work.

Strings are JSON strings; lines that begin with # are comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.op_tables import PAIRS
from schedc.ir.ops import FIRST_OF_PAIR, LETTERS, OpKind
from schedc.ir.program import EVERY_COLUMN, INT8_COLUMNS, InstructionKind, Program
from schedc.ir.schedule import OP_COLUMNS, Schedule
from schedc.ir.text_header import VERSION, WITH_WORKS, Header, HeaderLine, print_header, read_header
from schedc.ir.works import GROUP_NAMES, KIND_NAMES, LANE_NAMES, WorkGroup, WorkKind, WorkLane, WorkRow
from schedc.source import Source

_OPS_PER_LINE = 12
_CHANNELS = "AG"

# Schedules.


def print_schedule(schedule: Schedule) -> str:
    """The text form; ends with a newline."""
    lines = print_header("schedule", schedule)
    rows = list(zip(*(getattr(schedule, name).tolist() for name in OP_COLUMNS), strict=True))
    pairs = 0
    for rank in range(schedule.ranks):
        lines.append(f"rank {rank}")
        index, end = int(schedule.rank_start[rank]), int(schedule.rank_start[rank + 1])
        words: list[str] = []
        phase = span = -1
        while index < end:
            if words and (rows[index][4] != phase or len(words) == _OPS_PER_LINE):
                lines.append(f"  {phase}: {' '.join(words)}")
                words = []
            if not words:
                span = -1  # every line says its own
            phase = rows[index][4]
            paired = index + 1 < end and _is_pair(rows[index], rows[index + 1])
            number = rows[index][3]
            word, span = _print_op(rows[index], span)
            if paired:
                second, span = _print_op(rows[index + 1], span)
                word = f"({word};{second})"
            words.append(word if number == (pairs if paired else -1) else f"{word}&{number}")
            pairs += paired
            index += 1 + paired
        if words:
            lines.append(f"  {phase}: {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _is_pair(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    same = first[3] >= 0 and first[3:5] == second[3:5]
    return same and bool(PAIRS[first[0], second[0]])


def _print_op(row: tuple[int, ...], span: int) -> tuple[str, int]:
    text = f"{row[1]}{LETTERS[row[0]]}{row[2]}"
    return (text if row[5] == span else f"{text}@{row[5]}"), row[5]


_OP = rf"(\d+)([{LETTERS}])(\d+)(?:@(\d+))?"
_WORD = re.compile(rf"(?:\({_OP};{_OP}\)|{_OP})(?:&(\d+))?", re.ASCII)


def parse_schedule(text: str, file: str = "<schedule>") -> Schedule:
    """The schedule that ``text`` describes; the source that its spans point into is not part of the text.

    Raises DiagnosticError: S390 for anything that is not the format, S392 for another version. What the ops mean
    is for `schedc.ir.verify`.
    """
    header, rows, starts = _read("schedule", text, file)
    return Schedule(rank_start=starts, **header.common(), **_columns(rows, OP_COLUMNS))


def _read_ops(header: Header, line: HeaderLine, rows: list[tuple[int, ...]], pairs: int) -> int:
    """Adds the ops of one line; gives the number of pairs so far."""
    start = re.match(r"(\d+):(?= |$)", line.text, re.ASCII)
    if start is None:
        line.fail("`<phase>: <op> ...` is expected", help="for example `0: 0F0@1 0F1 (1F2;1B0)`")
    phase = _index(line, start, 1, len(header.lines["phase"]), "phase")
    span = -1
    for word in re.finditer(r"\S+", line.text[start.end() :]):
        offset = start.end() + word.start()
        match = _WORD.match(line.text, offset, start.end() + word.end())
        if match is None or match.end() != start.end() + word.end():
            line.fail(f"`{word[0][:40]}` is not an op", offset, len(word[0]),
                      help="an op is written 0F3, 5I2, 5W2, 2B1 or 2R1, a pair (3F4;2B1)")  # fmt: skip
        paired = match[1] is not None
        pair = line.number_at(match[13], match.start(13)) if match[13] else (pairs if paired else -1)
        pairs += paired
        for group in (1, 5) if paired else (9,):
            if match[group + 3]:
                span = _index(line, match, group + 3, len(header.lines["span"]), "span")
            if span < 0:
                line.fail("the first op of a line names its span, as in 0F0@1", offset, len(word[0]))
            stage, of = (line.number_at(match[g], match.start(g)) for g in (group, group + 2))
            rows.append((LETTERS.index(match[group + 1]), stage, of, pair, phase, span))
    return pairs


# Programs.

_COMPUTE = "{stage}{letter}{microbatch}"
_TEMPLATES: dict[InstructionKind, str] = {
    **dict.fromkeys(map(InstructionKind, OpKind), _COMPUTE),
    InstructionKind.CELL: "({stage}{first}{microbatch};{stage2}{second}{microbatch2})",
    InstructionKind.SEND: "SEND {stage}{channel}{microbatch} to {peer} #{message}{batch}",
    InstructionKind.RECV: "RECV {stage}{channel}{microbatch} from {peer} #{message}{batch}",
    InstructionKind.WAIT: "WAIT {stage}{channel}{microbatch} with {peer} #{message}",
    InstructionKind.REDUCE: "REDUCE {stage}{tied} with {peer} #{message}",
    InstructionKind.START: "START {work_kind} {stage}{of} on {lane} #{work} bytes {bytes}{group}",
    InstructionKind.JOIN: "JOIN {work_kind} {stage}{of} #{work}",
}
"""How each kind is written. Both directions follow from this table: printing fills it in, reading turns each
``{column}`` into a group of a pattern."""
_TAIL = " | {op} {phase}@{span}"
_LETTERED = {
    "letter": (LETTERS, 1), "channel": (_CHANNELS, 1), "first": (LETTERS, FIRST_OF_PAIR), "second": (LETTERS, 1),
}  # fmt: skip
"""Groups that are one letter: the letters by value, and what a value counts in its column, which two may share."""
_PROGRAM_COLUMNS = ("kind", *EVERY_COLUMN)
_COLUMN_OF = {"letter": "kind", "tied": "stage2", "of": "microbatch", "first": "backward", "second": "backward"}
"""What templates call otherwise than the columns."""
_COLUMN_NUMBER = {name: number for number, name in enumerate(_PROGRAM_COLUMNS)}
_COLUMN_NUMBER |= {name: _COLUMN_NUMBER[column] for name, column in _COLUMN_OF.items()}

_WORK_WORDS = {"work_kind": KIND_NAMES, "lane": LANE_NAMES, "bytes": (), "group": GROUP_NAMES[1:]}
"""Groups that are columns of `Works`: their words by value; empty for a number."""
_COLUMN_NUMBER |= dict.fromkeys(_WORK_WORDS, -1)

_OPTIONAL = {"op": ("-", "%d"), "batch": ("", " batch %d"), "tied": ("", " tied to %d"), "of": ("", "A%d")}
"""Columns that may be -1 in an instruction with the column: the text for -1, and for other values."""


_BYTES = r"\d{1,18}(?:\.\d{1,18})?(?:e-?\d{1,2})?"


@dataclass(frozen=True)
class _Form:
    """A template taken apart: the pattern of its texts, and of each group the column, letters and weight."""

    kind: InstructionKind
    pattern: re.Pattern[str]
    groups: tuple[tuple[int, str, int], ...]


def _form(kind: InstructionKind, template: str) -> _Form:
    special = {"op": r"(\d+|-)", "batch": r"(?: batch (\d+))?", "tied": r"(?: tied to (\d+))?", "of": r"(?:A(\d+))?"}
    special |= {name: f"([{letters}])" for name, (letters, _) in _LETTERED.items()}
    special |= {name: f"(?P<{name}>{'|'.join(words) or _BYTES})" for name, words in _WORK_WORDS.items()}
    special["group"] = f"(?: over {special['group']})?"
    pieces = re.split(r"\{(\w+)\}", template + _TAIL)
    fixed = [re.escape(piece).replace(r"\ ", " +") for piece in pieces[::2]]
    groups = [special.get(name, r"(\d+)") for name in pieces[1::2]]
    pattern = re.compile("".join(a + b for a, b in zip(fixed, [*groups, ""], strict=True)), re.ASCII)
    return _Form(kind, pattern, tuple((_COLUMN_NUMBER[name], *_LETTERED.get(name, ("", 1))) for name in pieces[1::2]))


_COMPUTE_FORM = _form(InstructionKind.F, _COMPUTE)
_FORMS = {t[:3] if t[0].isalpha() else t[0]: _form(kind, t) for kind, t in _TEMPLATES.items() if t != _COMPUTE}
"""Forms by the first letters of their texts."""


def print_program(program: Program) -> str:
    """The text form; ends with a newline. No field that applies to an instruction is lost."""
    rows = np.empty(len(program), object)
    for kind, template in _TEMPLATES.items():
        of_kind = np.flatnonzero(program.kind == kind)
        left, right = (_printed(program, part, of_kind) for part in (template, _TAIL))
        rows[of_kind] = [f"  {a:<34}{b}" for a, b in zip(left, right, strict=True)]
    lines = print_header("program", program, WITH_WORKS if len(program.works) else VERSION)
    for rank in range(program.ranks):
        lines.append(f"rank {rank}")
        lines += rows[int(program.rank_start[rank]) : int(program.rank_start[rank + 1])].tolist()
    return "\n".join(lines) + "\n"


def _printed(program: Program, template: str, rows: Int64) -> list[str]:
    """A template filled in for each of the rows."""
    names = re.findall(r"\{(\w+)\}", template)
    columns = []
    for name in names:
        if name in _WORK_WORDS:
            columns.append(_printed_of_works(program, name, rows))
            continue
        values = getattr(program, _COLUMN_OF.get(name, name))[rows].tolist()
        if name in _LETTERED:
            letters, weight = _LETTERED[name]
            values = [letters[value // weight % FIRST_OF_PAIR] for value in values]
        elif name in _OPTIONAL:
            absent, present = _OPTIONAL[name]
            values = [absent if value < 0 else present % value for value in values]
        columns.append(values)
    fill = re.sub(r"\{\w+\}", "%s", template)
    return [fill % values for values in zip(*columns, strict=True)]


def _printed_of_works(program: Program, name: str, rows: Int64) -> list[str]:
    """A column of the works that the rows name, as it is printed."""
    works, numbers = program.works, program.work[rows]
    if name == "bytes":
        return [str(int(size)) if size.is_integer() else repr(size) for size in works.bytes[numbers].tolist()]
    if name == "group":
        words = ["", *(f" over {word}" for word in _WORK_WORDS["group"])]
        return [words[value + 1] for value in works.group[numbers].tolist()]
    values = works.kind if name == "work_kind" else works.lane
    return [_WORK_WORDS[name][value] for value in values[numbers].tolist()]


def parse_program(text: str, file: str = "<program>") -> Program:
    """The program that ``text`` describes. Whether it can run is for `schedc.ir.verify_program`.

    Raises DiagnosticError: S390 for anything that is not the format, S392 for another version.
    """
    header, rows, starts = _read("program", text, file)
    columns = _columns(rows, _PROGRAM_COLUMNS)
    works, source = header.table_of_works(), header.fields["source"]
    queues = np.array(header.fields.get("communicators", ()), np.int32)
    known = {"source_name": source, "works": works, "communicators": queues}
    return Program(rank_start=starts, **known, **header.common(), **columns)


def _help_for(text: str) -> str:
    """What a line that is no instruction may have meant."""
    if not text.startswith(("START ", "JOIN ")):
        return "for example `SEND 0A3 to 1 #17 | 5 0@1`"
    kinds, lanes = ", ".join(_WORK_WORDS["work_kind"]), ", ".join(_WORK_WORDS["lane"])
    return f"for example `START offload 0A3 on d2h #0 bytes 64 | 5 0@1`; works: {kinds}; lanes: {lanes}"


def _read_instruction(header: Header, line: HeaderLine, rows: list[tuple[int, ...]]) -> None:
    form = _FORMS.get(line.text[:3]) or _FORMS.get(line.text[0]) or _COMPUTE_FORM
    match = form.pattern.fullmatch(line.text)
    if match is None:
        line.fail("this is not an instruction", help=_help_for(line.text))
    row = [-1] * len(_PROGRAM_COLUMNS)
    row[0] = form.kind
    for group, ((column, letters, weight), text) in enumerate(zip(form.groups, match.groups(), strict=True), 1):
        if column < 0:
            continue
        if letters:
            row[column] = max(row[column], 0) + weight * letters.index(text)
        elif text not in (None, "-"):
            row[column] = line.number_at(text, match.start(group))
    for group, limit, name in ((-1, len(header.lines["phase"]), "phase"), (0, len(header.lines["span"]), "span")):
        _index(line, match, len(form.groups) + group, limit, name)
    if form.kind in (InstructionKind.START, InstructionKind.JOIN):
        _read_work(header, line, match, row)
    rows.append(tuple(row))


def _read_work(header: Header, line: HeaderLine, match: re.Match[str], row: list[int]) -> None:
    """Keeps the work that a START describes, and the name that a JOIN calls it by."""
    number, kind = row[_COLUMN_NUMBER["work"]], WorkKind(KIND_NAMES.index(match["work_kind"]))
    if row[0] == InstructionKind.JOIN:
        header.joined.append((line, number, kind))
        return
    if number in header.works:
        line.fail(f"work {number} is started twice")
    stage, microbatch = (row[_COLUMN_NUMBER[name]] for name in ("stage", "microbatch"))
    lane = WorkLane(LANE_NAMES.index(match["lane"]))
    group = WorkGroup[(match["group"] or "local").upper()]
    header.works[number] = (line, WorkRow(kind, lane, stage, microbatch, float(match["bytes"]), group))


# Both.


def _read(form: str, text: str, file: str) -> tuple[Header, list[tuple[int, ...]], Int64]:
    """Header, rows, and where the rows of each rank begin, with their number behind."""
    header, lines = read_header(form, Source(file, text))
    rows: list[tuple[int, ...]] = []
    starts: list[int] = []
    pairs = 0
    for line in lines:
        if line.text.startswith("rank"):
            if line.text != f"rank {len(starts)}" or len(starts) >= header.ranks:
                _unexpected_rank(line, header, len(starts))
            starts.append(len(rows))
        elif form == "schedule":
            pairs = _read_ops(header, line, rows, pairs)
        else:
            _read_instruction(header, line, rows)
    if len(starts) != header.ranks:
        last = Source(file, text).lines
        HeaderLine(Source(file, text), len(last), 1, last[-1]).fail(
            f"{len(starts)} of {header.ranks} ranks are described"
        )
    return header, rows, np.array([*starts, len(rows)], np.int64)


def _unexpected_rank(line: HeaderLine, header: Header, described: int) -> NoReturn:
    if described >= header.ranks:
        line.fail(f"there are only {header.ranks} ranks")
    line.fail(f"`rank {described}` is expected here")


def _index(line: HeaderLine, match: re.Match[str], group: int, count: int, what: str) -> int:
    number = line.number_at(match[group], match.start(group))
    if number >= count:
        line.fail(f"{what} {number} does not exist: there are {count}, from 0", match.start(group), len(match[group]))
    return number


def _columns(rows: list[tuple[int, ...]], names: tuple[str, ...]) -> dict[str, Any]:
    table = np.array(rows, np.int64).reshape(-1, len(names)).T
    return {
        name: column.astype(np.int8 if name in INT8_COLUMNS else np.int32)
        for name, column in zip(names, table, strict=True)
    }
