"""The outline of a `.sched` file: its symbols as a tree, and the blocks that an editor can fold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from schedc.diagnostics import DiagnosticError
from schedc.editor.hover import syntax_nodes
from schedc.source import Source, Span
from schedc.syntax.parser import parse
from schedc.syntax.tree import Phase, ScheduleTree

_SIGNS = re.compile(r"#[^\n]*|\"[^\"\n]*\"|[{}]")


class OutlineSymbol(NamedTuple):
    """A part of a file. kind: schedule, plan, size, let, function, phase, claim or line. whole: with what is in it."""

    name: str
    kind: str
    place: Span
    whole: Span
    inner: tuple[OutlineSymbol, ...] = ()


def symbols(source: Source) -> list[OutlineSymbol]:
    """Schedules and plans in the order of the text; none where it does not parse."""
    try:
        file = parse(source)
    except DiagnosticError:
        return []
    ends = dict(blocks(source))

    def whole(span: Span) -> Span:
        """From a name to the end of the block that begins behind it."""
        begin = next((line for line in sorted(ends) if line >= span.line), span.line)
        end = ends.get(begin, span.end_line)
        return Span(span.line, span.column, end, max(len(source.line(end)) + 1, span.end_column))

    found = [OutlineSymbol(tree.name, "schedule", tree.span, whole(tree.span), tuple(_in_schedule(tree)))
             for tree in file.schedules]  # fmt: skip
    for plan in file.plans:
        lines = tuple(OutlineSymbol(line.word, "line", line.span, line.span) for line in plan.lines)
        found.append(OutlineSymbol(plan.name, "plan", plan.span, whole(plan.span), lines))
    return sorted(found, key=lambda each: each.place)


def _in_schedule(tree: ScheduleTree) -> Iterator[OutlineSymbol]:
    named = [(each.name, "size", each.span) for each in tree.parameters]
    named += [(each.name, "let", each.span) for each in tree.lets]
    named += [(each.name, "function", each.span) for each in tree.functions]
    named += [(each.name, "phase", each.span) for each in syntax_nodes(tree.ranks, Phase)]
    named += [(each.text, "claim", each.span) for each in tree.claims]
    for name, kind, span in sorted(named, key=lambda each: each[2]):
        yield OutlineSymbol(name, kind, span, span)


def blocks(source: Source) -> list[tuple[int, int]]:
    """First and last line of each block in braces that has several lines, in the order of their ends."""
    open_at, found = list[int](), []
    for match in _SIGNS.finditer(source.text):
        line = source.span_at(match.start(), match.end()).line
        if match[0] == "{":
            open_at.append(line)
        elif match[0] == "}" and open_at and (begin := open_at.pop()) < line:
            found.append((begin, line))
    return found
