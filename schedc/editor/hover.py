"""Explains the word of a `.sched` file at which a reader points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TypeVar

from schedc.diagnostics import DiagnosticError
from schedc.ir.ops import FACTS, LETTERS, OpKind
from schedc.source import Source, Span
from schedc.step.costs.keys import KEYS
from schedc.syntax.parser import parse
from schedc.syntax.plan_words import PLAN_WORDS
from schedc.syntax.tree import Function, Let, ScheduleTree, SizeParameter
from schedc.units import equations

_WORD = re.compile(r"[A-Za-z0-9_]+")
_PHASE = re.compile(r"\bphase\s+$")
_OP = re.compile(rf"([{LETTERS}])(\d*)")
N = TypeVar("N")
_MOST_RANKS = 16
"""Most ranks whose stages a hover text lists."""

WORDS: dict[str, str] = {
    "ranks": "size: the number of ranks, P",
    "microbatches": "size: the number of microbatches of a step, M",
    "chunks": "size: how many stages a rank holds",
    "segments": "size: into how many parts each microbatch is cut along its sequence",
    "count": "size: any other number",
    "linear": "placement: stage s on rank s",
    "loop": "placement: loop(v): chunk j of rank r is stage j*P + r",
    "v": "placement: rank r holds stage r (chunk 0) and stage 2*P-1-r (chunk 1)",
    "waves": "placement: waves(w): a snake of w turns, up and down the ranks",
    "map": "placement: map(n) { stage s on rank ... }: n stages, each where the expression puts it",
    "pipes": "placement: two directions, each with its own microbatches and its own copy of every stage",
    "min": "min(a, b, ...): the smallest",
    "max": "max(a, b, ...): the largest",
    "abs": "abs(a): without its sign",
    "ceildiv": "ceildiv(a, b): a / b, rounded up",
    "timed": "computed order, `timed { F at 2*m ... }`: each rank runs its ops in the order of their slots",
    "pair": "`timed pair`: two ops of a rank in one slot are an overlapped pair, such as F & I",
    "fill": "`fill W`: every W runs where its rank would wait; `within n`: a rank holds at most n activations",
    "policy": "computed order: each free rank starts the first op, by these rules, that is ready under the costs",
    "prefer": "`prefer I > F`: in a policy, ops of earlier kinds first; among equals the least slot, then the text",
    "cap": "`cap F - B <= n`: in a policy, an F starts only if then at most n more F than B have run",
    "at": "`F at n`: the slot of an op, in a `timed` block or a policy; in a plan: where, or how fast",
    "makespan": "metric: time from the first start to the last end of a step",
    "bubble": "metric: idle time of a rank within the makespan; the largest of all ranks, or bubble[r]",
    "span_bubble": "metric: idle time of a rank between its first start and its last end",
    "bubble_ratio": "metric: idle share of all ranks in the makespan",
    "span_bubble_ratio": "metric: 1 - all work / (P * longest span)",
    "peak_activations": "metric: the most activations (microbatches times chunks) that a rank holds at any time",
    "peak_activations_between": "metric: the most activations that a rank holds between ops",
    "peak_pending_weight": "metric: the most pending weight gradients of a rank",
    "ops": "metric: number of ops that a rank runs",
    **{key.name: f"cost: {key.meaning}" for key in KEYS if key.symbol and key.name not in LETTERS},
    **{row.word: f"line of a plan, `{row.form}`: {row.meaning}" for row in PLAN_WORDS},
}
"""By name that the language defines, except op letters: what the name means."""


def word_at(source: Source, line: int, column: int) -> tuple[str, Span] | None:
    """The word at a place outside of comments, and its span. line, column: from 1."""
    text = source.line(line)
    for match in _WORD.finditer(text.split("#")[0]):
        if match.start() < column <= match.end() + 1:
            return match[0], Span(line, match.start() + 1, line, match.end() + 1)
    return None


def hover_code(source: Source, line: int, column: int) -> tuple[str, Span] | None:
    """Markdown about the word at a place, and the span of the word; None if the word has no meaning.

    Names of the file come first: a size called ``v`` hides the placement. They are known only if the file parses.
    """
    located = word_at(source, line, column)
    if located is None:
        return None
    word, span = located
    if _PHASE.search(source.line(line)[: span.column - 1]):
        return None  # the name of a phase, whatever the language calls so
    try:
        trees = parse(source).schedules
    except DiagnosticError:
        trees = ()
    tree = next((tree for tree in reversed(trees) if tree.span <= span), None)
    text = (_of_file(tree, word, span) if tree else None) or _of_language(tree, word)
    return (text, span) if text else None


def _of_file(tree: ScheduleTree, word: str, span: Span) -> str | None:
    """The text about a name that the schedule defines: the schedule itself, a size, a `let` or a function."""
    if word == tree.name and tree.span.line == span.line:
        return _figures(tree)
    for parameter in tree.parameters:
        if parameter.name == word:
            return _size(parameter)
    definitions: list[Let | Function] = [*syntax_nodes(tree, Let), *syntax_nodes(tree, Function)]
    if defined := [item for item in definitions if item.name == word]:
        before = [item for item in defined if item.span <= span]
        return _definition(tree, (before or defined)[-1])
    return None


def syntax_nodes(node: object, kind: type[N]) -> Iterator[N]:
    """Every node of a kind below a node of the tree, in the order of its fields; none inside of another one."""
    if isinstance(node, kind):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from syntax_nodes(item, kind)
    elif is_dataclass(node) and not isinstance(node, Source):
        for field in fields(node):
            yield from syntax_nodes(getattr(node, field.name), kind)


def _size(parameter: SizeParameter) -> str:
    default = "" if parameter.default is None else f", {parameter.default} by default"
    return f"`{parameter.name}`: {WORDS[parameter.role]}{default}"


def _definition(tree: ScheduleTree, item: Let | Function) -> str:
    return f"```sched\n{tree.source.line(item.span.line).strip()}\n```"


def _of_language(tree: ScheduleTree | None, word: str) -> str | None:
    """The text about an op or a name that the language defines."""
    if match := _OP.fullmatch(word):
        kind = OpKind[match[1]]
        text = f"`{word}`: {FACTS[kind].name}" + (f" of chunk {match[2]}" if match[2] else "")
        return text + (_stages(tree, int(match[2] or 0)) if tree else "")
    return f"`{word}`: {WORDS[word]}" if word in WORDS else None


def _stages(tree: ScheduleTree, chunk: int) -> str:
    """The stage of a chunk on each rank, at the default sizes."""
    from schedc.compiler import legal_schedule
    from schedc.editor.sizes import editor_sizes

    try:
        placement = legal_schedule(tree, editor_sizes(tree)).placement
    except DiagnosticError:
        return ""
    if chunk >= placement.chunks:
        return ""
    stages = placement.stage_of_chunk[:_MOST_RANKS, chunk].tolist()
    rows = ", ".join(f"rank {rank}: stage {stage}" for rank, stage in enumerate(stages) if stage >= 0)
    return f"\n\n{rows}" + (", ..." if placement.ranks > _MOST_RANKS else "")


def _figures(tree: ScheduleTree) -> str:
    """The documentation of a schedule, and its times and memory at the default sizes and unit costs."""
    from schedc.compiler import legal_schedule
    from schedc.editor.sizes import editor_sizes
    from schedc.step.memory import measure_memory
    from schedc.step.timeline import simulate

    try:
        schedule = legal_schedule(tree, editor_sizes(tree))
    except DiagnosticError:
        return tree.doc
    timeline, memory = simulate(schedule), measure_memory(schedule)
    sizes = equations(schedule.sizes)
    figures = (
        f"{sizes}: makespan {timeline.makespan:g}, bubble ratio {timeline.bubble_ratio:.4f}, "
        f"at most {memory.peak_activations.max()} activations on a rank"
    )
    return f"{tree.doc}\n\n{figures}" if tree.doc else figures
