"""The checks of a plan's lines before any size is known: what is said twice, missing, or names nothing."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.layout.costs import PerKind
from schedc.plan.checks import check_directives
from schedc.plan.read import read_directives
from schedc.source import Span
from schedc.syntax.plan import GivenValue, LayersLine, LayoutLine, MemoryLine, PlanTree, TableLine
from schedc.syntax.tokens import PLAN_LINES

_PLACES = ("last", "first", "auto")
_OPTIONS: dict[type, tuple[str, ...]] = {LayersLine: ("dense", "mtp", "pad"), LayoutLine: ("dense",)}


def check_plan_lines(plan: PlanTree) -> list[Diagnostic]:
    """What is wrong with the lines of a plan, before any size is known (S144 to S152, S401)."""
    found = [*_line_faults(plan)]
    for line in plan.lines:
        if isinstance(line, LayersLine | LayoutLine):
            found += _name_faults(plan, line.options, _OPTIONS[type(line)], "S144", "option")
        if isinstance(line, LayersLine):
            found += _spot_faults(plan, line)
        if isinstance(line, TableLine):
            found += _name_faults(plan, line.entries, PerKind._fields, "S401", "kind of layer")
    return [*found, *check_directives(read_directives(plan))]


def _line_faults(plan: PlanTree) -> Iterator[Diagnostic]:
    """Layers are placed exactly once, and nothing else is said twice."""
    where = [line for line in plan.lines if isinstance(line, LayersLine | LayoutLine)]
    if not where:
        help = 'write `layers 61`, or a layout: `layout "Et*3|(tt|)*29,m|L"`'
        yield _fault(plan, "S144", "a plan that does not say where the layers are", plan.span, help)
    for second in where[1:]:
        yield _fault(plan, "S144", "the layers are placed twice", second.span, "keep one `layers` or `layout` line")
    seen: set[str] = set()
    for line in plan.lines:
        word = line.table if isinstance(line, TableLine) else "memory"
        if isinstance(line, TableLine | MemoryLine) and word in seen:
            yield _fault(plan, "S144", f"`{word}` is said twice", line.span, f"keep one `{word}` line")
        seen.add(word if isinstance(line, TableLine | MemoryLine) else "")


def _name_faults(
    plan: PlanTree, given: tuple[GivenValue, ...], known: tuple[str, ...], code: str, what: str
) -> Iterator[Diagnostic]:
    for at, entry in enumerate(given):
        if entry.name not in known:
            help = did_you_mean(entry.name, (*known, *PLAN_LINES))
            help = help if help.startswith("did") else f"known here: {', '.join(known)}"
            yield _fault(plan, code, f"`{entry.name}` is no {what}", entry.span, help)
        elif entry.name in {other.name for other in given[:at]}:
            yield _fault(plan, "S144", f"`{entry.name}` is said twice", entry.span, "keep one of the two")


def _spot_faults(plan: PlanTree, line: LayersLine) -> Iterator[Diagnostic]:
    if isinstance(line.at, str) and line.at not in _PLACES:
        help = did_you_mean(line.at, _PLACES) or "last, first, auto, or places as [0, 31, 63]"
        yield _fault(plan, "S144", f"no places are called `{line.at}`", line.at_span, help)
    elif line.at not in (None, "auto") and not any(option.name == "pad" for option in line.options):
        yield _fault(plan, "S144", "places of paddings, and no paddings", line.at_span, "say how many: `pad 3`")


def _fault(plan: PlanTree, code: str, message: str, span: Span, help: str = "") -> Diagnostic:
    return Diagnostic(code, message, Label(span), help=help, source=plan.source)
