"""What an editor shows between the words of a `.sched` file at its default sizes: counts of loops, bubble and peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.editor.sizes import editor_sizes
from schedc.elaborate.evaluate import RANK, Evaluator, Scope
from schedc.elaborate.names import check
from schedc.elaborate.schedule import file_scope
from schedc.elaborate.sizes import bind_sizes, parameter_of_role
from schedc.source import Source
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from schedc.syntax import tree as t
from schedc.syntax.parser import parse
from schedc.units import equations

_MOST_RANKS = 8


class Hint(NamedTuple):
    """A text behind a place. line, column: from 1."""

    line: int
    column: int
    text: str


def hints(source: Source) -> list[Hint]:
    """The hints of all schedules of a text without faults, which have default sizes."""
    try:
        trees = parse(source).schedules
    except DiagnosticError:
        return []
    found: list[Hint] = []
    for tree in trees:
        if not check(tree) and all(each.default is not None for each in tree.parameters):
            found += _of(tree)
    return found


def _of(tree: t.ScheduleTree) -> list[Hint]:
    try:
        sizes = editor_sizes(tree)
        schedule, counts = legal_schedule(tree, sizes), list(_counts(tree, sizes))
    except DiagnosticError:
        return []
    timeline, memory = simulate(schedule), measure_memory(schedule)
    text = f"bubble {timeline.bubble_ratio:.1%}, peak {int(memory.peak_activations.max())}"
    text += f", checked at {equations(sizes)}" if sizes else ""
    return [Hint(tree.span.end_line, tree.span.end_column, text), *counts]


def _counts(tree: t.ScheduleTree, given: Mapping[str, int]) -> Iterator[Hint]:
    """How often each loop runs on each rank, for loops that stand in no other one."""
    sizes = bind_sizes(tree, given)
    evaluator = Evaluator(tree.source, sizes, {each.name: each for each in tree.functions})
    ranks = sizes[parameter_of_role(tree, "ranks").name]
    for block in tree.ranks:
        every = np.arange(ranks, dtype=np.int64)
        scope = Scope(ranks, {block.variable: every, RANK: every}, file_scope(tree, evaluator, sizes))
        yield from _in_block(block.body, evaluator, scope)


def _in_block(body: Sequence[t.Statement], evaluator: Evaluator, scope: Scope) -> Iterator[Hint]:
    scope = scope.inside()
    for statement in body:
        match statement:
            case t.Let(name=name, value=value):
                scope.names[name] = evaluator.value(value, scope)
            case t.Phase(body=inner):
                yield from _in_block(inner, evaluator, scope)
            case t.Repeat(count=count, span=span):
                yield Hint(span.end_line, span.end_column, _times(evaluator.value(count, scope)))


def _times(count: object) -> str:
    """How often: one number, or by rank where ranks differ."""
    each = np.unique(np.asarray(count))
    if each.size == 1:
        return f"{int(each[0])} times"
    values = np.asarray(count)[:_MOST_RANKS].tolist()
    return f"{', '.join(map(str, values))}{', ...' if np.asarray(count).size > _MOST_RANKS else ''} times by rank"
