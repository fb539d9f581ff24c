"""What the files of the directives are made of: the lines being read, the lines read, and the row of a directive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, TypeVar

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.ir.placement import Placement
from schedc.ir.plan import Plan, Recompute
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import Scoped, line_per_stage, missing, stages_of
from schedc.plan.layout.parts import Layout
from schedc.source import Span
from schedc.syntax.plan import GivenValue, PlanTree, RulePart, TableLine, Word

Value = TypeVar("Value")


@dataclass(frozen=True)
class StageLine(Generic[Value]):
    """A line about stages: ``recompute``, or ``slices``. scope: ``all``, ``chunk`` or ``stage``.

    numbers: which chunks or stages. value: levels, or a number of slices. auto: the compiler chooses those of these
    stages; ``value`` then recomputes nothing, or is 1.
    """

    scope: str
    numbers: tuple[int, ...]
    value: Value
    span: Span
    auto: bool = False


def per_stage(
    lines: Sequence[StageLine[Value]], otherwise: Value, stages: int, placement: Placement | None = None
) -> tuple[Value, ...]:
    """[stages] the value of each stage's line; empty where there is no line. Lines for chunks need the placement.

    otherwise: the value of a stage without a line.
    """
    followed = line_per_stage(lines, stages, placement)
    return tuple(followed[s].value if s in followed else otherwise for s in range(stages)) if lines else ()


def by_value(values: Sequence[Value]) -> Iterator[tuple[Value, str]]:
    """Each value of stages with the scope that a line of it has; values: [stages]."""
    for value in dict.fromkeys(values):
        stages = [stage for stage, own in enumerate(values) if own == value]
        yield value, "all" if len(stages) == len(values) else f"stage [{', '.join(map(str, stages))}]"


def neighbours(rows: Sequence[Value]) -> Iterator[tuple[Value, str]]:
    """Neighbouring stages with equal rows: their row, and their name. rows: [stages]."""
    for row, group in groupby(enumerate(rows), key=lambda pair: pair[1]):
        stages = [stage for stage, _ in group]
        yield row, f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"


@dataclass
class Directives:
    """The directives of a plan, while they are read and later.

    plan: the attachments without `recompute` and `slices`, whose stages are not known yet. requests: the ``recompute``
    lines. slices: the ``slices`` lines. spans: the first line of each word. findings: what is wrong with the lines.
    segments: the schedule's size that says the segments of a microbatch; "" where it has none.
    """

    tree: PlanTree
    plan: Plan = field(default_factory=Plan)
    requests: list[StageLine[Recompute]] = field(default_factory=list)
    slices: list[StageLine[int]] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    segments: str = ""

    @property
    def in_bytes(self) -> bool:
        """Whether the plan says its memory with a unit."""
        return self.tree.memory is not None and bool(self.tree.memory.unit)

    def entries(self, word: str) -> tuple[GivenValue, ...]:
        """The numbers in the lines of a `TableLine` word."""
        tables = (line for line in self.tree.lines if isinstance(line, TableLine) and line.word == word)
        return tuple(entry for table in tables for entry in table.entries)

    @property
    def automatic(self) -> bool:
        """Whether the compiler chooses the levels of some stages."""
        return any(request.auto for request in self.requests)

    @property
    def chooses_slices(self) -> bool:
        """Whether the compiler chooses the slices of stages."""
        return any(line.auto for line in self.slices)

    def span(self, word: str) -> Span:
        """The place of a word's line; the plan's name where it has no such line."""
        return self.spans.get(word, self.tree.span)

    def fault(self, place: str | Span, code: str, message: str, help: str = "", **more: Any) -> Diagnostic:
        """A finding at a place of the plan, or at the line of a word. more: further fields of the `Diagnostic`."""
        label = Label(self.span(place) if isinstance(place, str) else place)
        return Diagnostic(code, message, label, help=help, source=self.tree.source, **more)

    def report(self, code: str, message: str, place: str | Span, help: str = "", notes: tuple[str, ...] = ()) -> None:
        """Adds a `fault` to the findings."""
        self.findings.append(self.fault(place, code, message, help, notes=notes))

    def give(self, **values: Any) -> None:
        """Sets fields of the attachments."""
        self.plan = replace(self.plan, **values)

    def word(self, word: Word | GivenValue | RulePart, known: Iterable[str], what: str) -> bool:
        """Whether a word or a name is one of ``known``; if not, it is reported as no ``what``."""
        names, text = tuple(known), word.text if isinstance(word, Word) else word.name
        if text in names:
            return True
        near = did_you_mean(text, names)
        choice = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        help = near if near.startswith("did you mean") else f"write {choice}"
        self.report("S144", f"`{text}` is no {what}", word.span, help)
        return False


def scope_faults(
    code: str, what: str, lines: Iterable[tuple[Scoped, Span]], directives: Directives, schedule: Schedule
) -> Iterator[Diagnostic]:
    """Lines about stages or chunks that do not exist, and two of one scope for one stage. what: `two levels`."""
    placement = schedule.placement
    first: dict[tuple[str, int], Span] = {}
    for request, span in lines:
        if absent := missing(request, placement):
            help = f"the schedule has {placement.stages} stages at these sizes, {placement.chunks} chunks on a rank"
            yield directives.fault(span, code, f"there is no {request.scope} {absent[0]}", help)
            continue
        stages = stages_of(request, placement.stages, placement)
        if twice := [first[request.scope, stage] for stage in stages if (request.scope, stage) in first]:
            message = f"{what} for the same {request.scope if request.scope != 'all' else 'stages'}"
            help = "keep one; a line for a stage goes before one for a chunk, and that before one for all"
            yield directives.fault(span, code, message, help, secondary=(Label(twice[0], "the other"),))
        first |= {(request.scope, stage): span for stage in stages}


def no_findings(_directives: Directives, _schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """The default of `Directive.check_schedule`."""
    return iter(())


@dataclass(frozen=True)
class Directive:
    """The row of a directive in the table `schedc.plan.directives.DIRECTIVES`, from the directive's file.

    read: reads a line into the attachments, and reports what is wrong with the line by itself.
    write: yields its lines in the canonical text. several: whether a plan may have several of its lines.
    check_lines: reports what is wrong beside another line, before any size is known.
    check_schedule: yields what is wrong for this schedule and layout. Plans made in Python do not meet it.
    resolve: gives the fields that a schedule decides.
    facts: gives keys of the plan's report, for ``--json``. text: yields lines of that report.
    """

    word: str
    read: Callable[[Directives, Any], None]
    write: Callable[[Plan], Iterator[str]]
    several: bool = False
    check_lines: Callable[[Directives], None] = lambda reading: None
    check_schedule: Callable[[Directives, Schedule, Layout], Iterator[Diagnostic]] = no_findings
    resolve: Callable[[Directives, Schedule], dict[str, Any]] = lambda directives, schedule: {}
    facts: Callable[[Plan, Layout], dict[str, Any]] = lambda plan, layout: {}
    text: Callable[[dict[str, Any]], Iterator[str]] = lambda facts: iter(())
