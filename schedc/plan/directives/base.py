"""What the files of the directives are made of: the lines being read, the lines read, and the row of a directive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.ir.plan import Plan, Recompute
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import Scoped, missing, stages_of
from schedc.plan.layout.parts import Layout
from schedc.source import Span
from schedc.syntax.plan import GivenValue, PlanTree, TableLine, Word


@dataclass(frozen=True)
class RecomputeRequest:
    """A ``recompute`` line. scope: ``all``, ``chunk`` or ``stage``. numbers: which chunks or stages.

    auto: the compiler chooses the levels of these stages; ``recompute`` then recomputes nothing.
    """

    scope: str
    numbers: tuple[int, ...]
    recompute: Recompute
    span: Span
    auto: bool = False


@dataclass(frozen=True)
class SlicesRequest:
    """A ``slices`` line; scope and numbers as in `RecomputeRequest`. count: number of slices of a microbatch."""

    scope: str
    numbers: tuple[int, ...]
    count: int
    span: Span


@dataclass(frozen=True)
class Directives:
    """The directives of a plan, read.

    plan: the attachments without `recompute` and `slices`, whose stages are not known yet. requests: the ``recompute``
    lines. slices: the ``slices`` lines.
    spans: the first line of each word. findings: what is wrong with the lines, by place.
    segments: the schedule's size that says the segments of a microbatch; "" where it has none.
    """

    tree: PlanTree
    plan: Plan
    requests: tuple[RecomputeRequest, ...]
    spans: Mapping[str, Span]
    findings: tuple[Diagnostic, ...] = ()
    slices: tuple[SlicesRequest, ...] = ()
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

    def span(self, word: str) -> Span:
        """The place of a word's line; the plan's name where it has no such line."""
        return self.spans.get(word, self.tree.span)

    def fault(self, place: str | Span, code: str, message: str, help: str = "", **more: Any) -> Diagnostic:
        """A finding at a place of the plan, or at the line of a word. more: further fields of the `Diagnostic`."""
        label = Label(self.span(place) if isinstance(place, str) else place)
        return Diagnostic(code, message, label, help=help, source=self.tree.source, **more)


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


@dataclass
class Reading:
    """The directives of a plan while they are read; fields as in `Directives`."""

    tree: PlanTree
    plan: Plan = field(default_factory=Plan)
    requests: list[RecomputeRequest] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    slices: list[SlicesRequest] = field(default_factory=list)

    def fault(self, code: str, message: str, span: Span, help: str = "", notes: tuple[str, ...] = ()) -> None:
        """Reports a finding at a place of the plan."""
        self.findings.append(Diagnostic(code, message, Label(span), notes=notes, help=help, source=self.tree.source))

    def give(self, **values: Any) -> None:
        """Sets fields of the attachments."""
        self.plan = replace(self.plan, **values)

    def span(self, word: str) -> Span:
        """The place of a word's line; the plan's name where it has no such line."""
        return self.spans.get(word, self.tree.span)

    def word(self, word: Word, known: Iterable[str], what: str) -> bool:
        """Whether a word is one of ``known``; if not, it is reported as no ``what``."""
        names = tuple(known)
        if word.text in names:
            return True
        near = did_you_mean(word.text, names)
        choice = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        help = near if near.startswith("did you mean") else f"write {choice}"
        self.fault("S144", f"`{word.text}` is no {what}", word.span, help)
        return False


def no_findings(_directives: Directives, _schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """The default of `Directive.check_schedule`."""
    return iter(())


@dataclass(frozen=True)
class Directive:
    """The row of a directive: what its file gives to the table `schedc.plan.directives.DIRECTIVES`.

    read: reads a line into the attachments, and reports what is wrong with the line by itself.
    write: yields its lines in the canonical text. several: whether a plan may have several of its lines.
    check_lines: reports what is wrong beside another line, before any size is known.
    check_schedule: yields what is wrong for this schedule and layout. Plans made in Python do not meet it.
    resolve: gives the fields that a schedule decides.
    facts: gives keys of the plan's report, for ``--json``. text: yields lines of that report.
    """

    word: str
    read: Callable[[Reading, Any], None]
    write: Callable[[Plan], Iterator[str]]
    several: bool = False
    check_lines: Callable[[Reading], None] = lambda reading: None
    check_schedule: Callable[[Directives, Schedule, Layout], Iterator[Diagnostic]] = no_findings
    resolve: Callable[[Directives, Schedule], dict[str, Any]] = lambda directives, schedule: {}
    facts: Callable[[Plan, Layout], dict[str, Any]] = lambda plan, layout: {}
    text: Callable[[dict[str, Any]], Iterator[str]] = lambda facts: iter(())
