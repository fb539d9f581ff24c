"""Finds where a name of a `.sched` file is defined and used, and gives it another name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from schedc.diagnostics import DiagnosticError
from schedc.editor.hover import word_at
from schedc.elaborate.names import NameUse, name_uses
from schedc.fixes import edited
from schedc.ir.ops import LETTERS
from schedc.source import Source, Span
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax.parser import parse
from schedc.syntax.plan import PlanTree
from schedc.syntax.tree import FileTree, ScheduleTree
from schedc.syntax.words import BUILTINS, METRICS

SCHEDULE, PHASE = "schedule", "phase"
_BEFORE = {"let": r"let\s+", "function": r"fn\s+", "loop variable": r"for\s+", "rank": r"rank\s+",
           "parameter": r"\(.*?", "stage": r"stage\s+"}  # fmt: skip
"""By the kind of a definition, what stands between the begin of its span and its name."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OP = re.compile(rf"[{LETTERS}]\d*")


@dataclass(frozen=True)
class Occurrence:
    """A name at a place. kind: what it is. defined: where its definition has the name."""

    name: str
    kind: str
    span: Span
    defined: Span


@lru_cache(maxsize=8)
def occurrences(source: Source) -> tuple[Occurrence, ...]:
    """All names of a text by place: of schedules, sizes, definitions and variables; none where it does not parse."""
    try:
        file = parse(source)
    except DiagnosticError:
        return ()
    found = [each for tree in file.schedules for each in _of_schedule(tree)]
    found += [each for plan in file.plans for each in _of_plan(plan, file)]
    return tuple(sorted(found, key=lambda each: each.span))


def _of_schedule(tree: ScheduleTree) -> Iterator[Occurrence]:
    yield Occurrence(tree.name, SCHEDULE, tree.span, tree.span)
    for use in name_uses(tree):
        yield Occurrence(use.name, use.meaning.kind, _place(tree.source, use), _defined(tree.source, use))


def _of_plan(plan: PlanTree, file: FileTree) -> Iterator[Occurrence]:
    """The schedule of a plan and its sizes, where the schedule is in the file."""
    yield Occurrence(plan.name, "plan", plan.span, plan.span)
    own = next((tree for tree in file.schedules if tree.name == plan.schedule), None)
    if own is None:
        return
    yield Occurrence(own.name, SCHEDULE, plan.schedule_span, own.span)
    sizes = {each.name: _start(each.span, each.name) for each in own.parameters}
    for given in plan.sizes:
        if given.name in sizes:
            yield Occurrence(given.name, "size", _start(given.span, given.name), sizes[given.name])


def _place(source: Source, use: NameUse) -> Span:
    return _defined(source, use) if use.span == use.meaning.span else _start(use.span, use.name)


def _defined(source: Source, use: NameUse) -> Span:
    """The place of the name in its definition."""
    span, before = use.meaning.span, _BEFORE.get(use.meaning.kind, "")
    pattern = re.compile(rf"{before}(?<![A-Za-z0-9_])({re.escape(use.name)})(?![A-Za-z0-9_])", re.DOTALL)
    rest = "\n".join([source.line(span.line)[span.column - 1 :], *source.lines[span.line : span.end_line]])
    match = pattern.search(rest)
    if match is None:
        return _start(span, use.name)
    above = rest[: match.start(1)].count("\n")
    column = match.start(1) - rest.rfind("\n", 0, match.start(1)) - 1 + (span.column if above == 0 else 1)
    return Span(span.line + above, column, span.line + above, column + len(use.name))


def _start(span: Span, name: str) -> Span:
    return Span(span.line, span.column, span.line, span.column + len(name))


def occurrence_at(source: Source, line: int, column: int) -> Occurrence | None:
    """The occurrence at a place. line, column: from 1."""
    place = word_at(source, line, column)
    return next((each for each in occurrences(source) if place and each.span == place[1]), None)


def references(source: Source, line: int, column: int) -> list[Span]:
    """All places of the name at a place, its definition too; none where there is no name."""
    one = occurrence_at(source, line, column)
    return [] if one is None else [each.span for each in occurrences(source) if _same(each, one)]


def _same(one: Occurrence, other: Occurrence) -> bool:
    return (one.name, one.defined) == (other.name, other.defined)


def rename(source: Source, line: int, column: int, name: str) -> list[Span] | str:
    """The places at which to write a new name, or why it cannot be."""
    one = occurrence_at(source, line, column)
    if one is None:
        return "there is no name of this file here"
    if one.kind != SCHEDULE and (not _NAME.fullmatch(name) or _OP.fullmatch(name)):
        return f"`{name}` is no name: a name begins with a letter, and is no op"
    if name in BUILTINS or name in (*METRICS, *COST_SYMBOLS):
        return f"`{name}` is a word of the language"
    every = occurrences(source)
    if any(each.name == name for each in every):
        return f"`{name}` already has a meaning in this file"
    places = [each.span for each in every if _same(each, one)]
    renamed = renamed_source(source, places, name)
    if len([each for each in occurrences(renamed) if each.name == name]) != len(places):
        return f"`{name}` has another meaning in the language"
    return places


def renamed_source(source: Source, places: list[Span], name: str) -> Source:
    """The source with another name at each of the places."""
    for span in sorted(places, reverse=True):
        source = edited(source, span, name)
    return source
