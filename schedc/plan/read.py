"""Reads the directives of a plan: from its lines to values, with the findings of the lines at their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.contradictions import contradictions
from schedc.plan.directives import DIRECTIVES
from schedc.plan.directives.base import Directives
from schedc.plan.in_slices import plan_in_slices
from schedc.plan.layout.costs import PerKind
from schedc.source import Span
from schedc.syntax.input import AppliedPlan
from schedc.syntax.plan import GivenValue, LayersLine, LayoutLine, MemoryLine, PlanTree, TableLine
from schedc.syntax.plan_words import PLAN_LINES
from schedc.units import bytes_of


def checked_lines(plan: AppliedPlan) -> Directives:
    """The checked directives of a plan, with the slices that are asked for beside it.

    Raises `DiagnosticError` with the findings of its lines, and S153 for slices that they exclude.
    """
    segments = next((size.name for size in plan.schedule.parameters if size.role == "segments"), "")
    directives = replace(read_directives(plan.tree), segments=segments)
    if findings := check_plan_lines(directives):
        raise DiagnosticError(findings)
    return directives if plan.slices is None else plan_in_slices(directives, plan.slices)


def read_directives(tree: PlanTree) -> Directives:
    """The directives of a plan. A line with findings says nothing else."""
    reading = Directives(tree)
    for line in tree.lines:
        if (directive := DIRECTIVES.get(line.word)) is None:
            continue
        if line.word in reading.spans and not directive.several:
            reading.report("S144", f"`{line.word}` is said twice", line.span, f"keep one `{line.word}` line")
            continue
        reading.spans.setdefault(line.word, line.span)
        directive.read(reading, line)
    _check(reading)
    reading.findings.sort(key=lambda finding: finding.primary.span)
    return reading


def _check(reading: Directives) -> None:
    """The findings of lines beside each other, before any size is known."""
    topology, requests = reading.plan.topology, reading.requests
    slices = tuple(line.value for line in reading.slices)
    plan = replace(reading.plan, recompute=tuple(line.value for line in requests), slices=slices)
    for wrong in contradictions(plan, topology.ranks if topology else None):
        spans = [line.span for line in (reading.slices if wrong.word == "slices" else requests)]
        place = wrong.word if wrong.index is None else spans[wrong.index]
        reading.report(wrong.code, wrong.message, place, wrong.help, wrong.notes)
    for directive in DIRECTIVES.values():
        directive.check_lines(reading)


OF_KINDS = ("costs", "parameters", "activations")
"""The lines with a number for each kind of part."""
_PLACES = ("last", "first", "auto")
_OPTIONS: dict[type, tuple[str, ...]] = {LayersLine: ("dense", "mtp", "pad"), LayoutLine: ("dense",)}


def check_plan_lines(directives: Directives) -> list[Diagnostic]:
    """What is wrong with the lines of a plan, before any size is known."""
    plan = directives.tree
    findings = [*_line_faults(plan)]
    for line in plan.lines:
        if isinstance(line, LayersLine | LayoutLine):
            findings += _name_faults(plan, line.options, _OPTIONS[type(line)], "S144", "option")
        if isinstance(line, LayersLine):
            findings += _spot_faults(plan, line)
        if isinstance(line, TableLine) and line.word in OF_KINDS:
            findings += _name_faults(plan, line.entries, PerKind._fields, "S401", "kind of layer")
    together = [*directives.findings, *_unit_faults(plan)]
    return [*findings, *sorted(together, key=lambda finding: finding.primary.span)]


def _line_faults(plan: PlanTree) -> Iterator[Diagnostic]:
    """S144: layers that are not placed exactly once, and other lines that stand twice."""
    placing = [line for line in plan.lines if isinstance(line, LayersLine | LayoutLine)]
    if not placing:
        help = 'write `layers 61`, or a layout: `layout "Et*3|(tt|)*29,m|L"`'
        yield _fault(plan, "S144", "a plan that does not say where the layers are", plan.span, help)
    for second in placing[1:]:
        yield _fault(plan, "S144", "the layers are placed twice", second.span, "keep one `layers` or `layout` line")
    seen: set[str] = set()
    for line in plan.lines:
        if line.word not in (*OF_KINDS, MemoryLine.word):
            continue
        if line.word in seen:
            yield _fault(plan, "S144", f"`{line.word}` is said twice", line.span, f"keep one `{line.word}` line")
        seen.add(line.word)


def _name_faults(
    plan: PlanTree, entries: tuple[GivenValue, ...], names: tuple[str, ...], code: str, what: str
) -> Iterator[Diagnostic]:
    """Entries whose name is not one of ``names``, or appears twice in the line."""
    for index, entry in enumerate(entries):
        if entry.name not in names:
            help = did_you_mean(entry.name, (*names, *PLAN_LINES))
            help = help if help.startswith("did") else f"known here: {', '.join(names)}"
            yield _fault(plan, code, f"`{entry.name}` is no {what}", entry.span, help)
        elif entry.name in {earlier.name for earlier in entries[:index]}:
            yield _fault(plan, "S144", f"`{entry.name}` is said twice", entry.span, "keep one of the two")


def _spot_faults(plan: PlanTree, line: LayersLine) -> Iterator[Diagnostic]:
    """S144: places of paddings that name nothing, or that no padding needs."""
    if isinstance(line.at, str) and line.at not in _PLACES:
        help = did_you_mean(line.at, _PLACES) or "last, first, auto, or places as [0, 31, 63]"
        yield _fault(plan, "S144", f"no places are called `{line.at}`", line.at_span, help)
    elif line.at not in (None, "auto") and not any(option.name == "pad" for option in line.options):
        yield _fault(plan, "S144", "places of paddings, and no paddings", line.at_span, "say how many: `pad 3`")


def _unit_faults(plan: PlanTree) -> Iterator[Diagnostic]:
    """S146: memory that is in bytes in one line and not in another, and times with a unit."""
    memory = plan.memory
    if memory and memory.unit and bytes_of(1, memory.unit) is None:
        help = "write KB, MB, GB or TB, or KiB to TiB"
        yield _fault(plan, "S146", f"`{memory.unit}` is no unit of memory", memory.span, help)
        return
    tables = [line for line in plan.lines if isinstance(line, TableLine) and line.word in OF_KINDS]
    for table, entry in [(line.word, entry) for line in tables for entry in line.entries]:
        if entry.unit and (table == "costs" or bytes_of(1, entry.unit) is None):
            help = "costs are times in any one unit" if table == "costs" else "memory is in KB to TB"
            yield _fault(plan, "S146", f"`{entry.unit}` in `{table}`", entry.span, help)
        elif memory and table != "costs" and bool(entry.unit) != bool(memory.unit) and entry.value:
            with_unit, without = ("it", "the memory") if entry.unit else ("the memory", "it")
            message = f"`{entry.name}` and the memory: {with_unit} is in bytes, {without} is not"
            yield _fault(plan, "S146", message, entry.span, "give units to both, or to neither")


def _fault(plan: PlanTree, code: str, message: str, span: Span, help: str = "") -> Diagnostic:
    return Diagnostic(code, message, Label(span), help=help, source=plan.source)
