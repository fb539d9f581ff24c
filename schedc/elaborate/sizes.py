"""The sizes of a schedule: from the caller, from defaults, within bounds, and what to try when a `require` fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError, did_you_mean
from schedc.elaborate.evaluate import MAX_VALUE, Evaluator, Scope
from schedc.elaborate.place import MAX_STAGES
from schedc.syntax import tree as t

MAX_MICROBATCHES = 65_536

BOUNDS: dict[str, tuple[int, int]] = {
    "ranks": (1, 4_096),
    "microbatches": (1, MAX_MICROBATCHES),
    "chunks": (1, MAX_STAGES),
    "segments": (1, 64),
    "count": (0, MAX_VALUE),
}
"""Least and largest value of a size, by its role."""

_TRIES = 256


def parameter_of_role(tree: t.ScheduleTree, wanted: str) -> t.SizeParameter:
    """The one parameter with that role (`check` has made sure of ranks and microbatches)."""
    return next(parameter for parameter in tree.parameters if parameter.role == wanted)


def segments_per_microbatch(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> int:
    """The segments of each microbatch; 1 where no size has that role."""
    return next((sizes[parameter.name] for parameter in tree.parameters if parameter.role == "segments"), 1)


def bind_sizes(tree: t.ScheduleTree, given: Mapping[str, int]) -> dict[str, int]:
    """Every parameter with its value.

    Raises `DiagnosticError` with all unknown, missing and illegal sizes (S111, S112, S113): `RequestError` unless a
    default of the file is one of them.
    """
    found = unknown_sizes(tree, given)
    asked = True
    bound: dict[str, int] = {}
    for parameter in tree.parameters:
        value = given.get(parameter.name, parameter.default)
        least, largest = BOUNDS[parameter.role]
        label = Label(parameter.span, f"a number of {parameter.role}" if parameter.role != "count" else "")
        if value is None:
            message = f"the size `{parameter.name}` has no default and was not given"
            help = f"give it: -D {parameter.name}={least if parameter.role != 'ranks' else 4}"
            found.append(Diagnostic("S112", message, label, help=help, source=tree.source))
        elif not least <= value <= largest:
            asked = asked and parameter.name in given
            message = f"{parameter.name} = {value} is not between {least} and {largest:,}"
            found.append(Diagnostic("S113", message, label, source=tree.source))
        else:
            bound[parameter.name] = int(value)
    if not found:
        found, asked = _too_many_segments(tree, bound), differ_from_defaults(tree, bound)
    if found:
        raise (RequestError if asked else DiagnosticError)(found)
    return bound


def unknown_sizes(tree: t.ScheduleTree, given: Iterable[str]) -> list[Diagnostic]:
    """A finding (S111) for each name that is none of a size of ``tree``."""
    names = [parameter.name for parameter in tree.parameters]
    return [
        Diagnostic(
            "S111",
            f"`{tree.name}` has no size `{name}`",
            Label(tree.span),
            help=did_you_mean(name, names),
            source=tree.source,
        )
        for name in given
        if name not in names
    ]


def differ_from_defaults(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> bool:
    """Whether these sizes are other than the defaults of the file: what fails at them is then no fault of the file."""
    return any(sizes[parameter.name] != parameter.default for parameter in tree.parameters)


def _too_many_segments(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Whether the segments of all microbatches are more than there may be microbatches."""
    total = sizes[parameter_of_role(tree, "microbatches").name] * segments_per_microbatch(tree, sizes)
    if total <= MAX_MICROBATCHES:
        return []
    span = next(parameter.span for parameter in tree.parameters if parameter.role == "segments")
    message = f"{total:,} segments of microbatches; there may be {MAX_MICROBATCHES:,}"
    return [Diagnostic("S113", message, Label(span), source=tree.source)]


def unmet_requirement(tree: t.ScheduleTree, require: t.Require, sizes: Mapping[str, int]) -> Diagnostic:
    """What to say of a `require` that does not hold."""
    where = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    message = f"`{tree.name}` requires {require.text}, which does not hold for {where}"
    hints = (_hint(tree, sizes, parameter) for parameter in _most_easily_changed(tree))
    help = next((hint for hint in hints if hint), "")
    return Diagnostic("S114", message, Label(require.span), help=help, source=tree.source)


def lets_and_requires(tree: t.ScheduleTree) -> list[t.Let | t.Require]:
    """The `let`s and `require`s of the schedule as written: each may rely on those above it."""
    items: list[t.Let | t.Require] = [*tree.lets, *tree.requires]
    return sorted(items, key=lambda item: item.span)


def _most_easily_changed(tree: t.ScheduleTree) -> Iterator[t.SizeParameter]:
    order = ("microbatches", "count", "segments", "chunks", "ranks")
    yield from sorted(tree.parameters, key=lambda parameter: order.index(parameter.role))


def _hint(tree: t.ScheduleTree, sizes: Mapping[str, int], parameter: t.SizeParameter) -> str:
    """The nearest larger, else the nearest smaller value of one size with which every `require` holds."""
    value, (least, largest) = sizes[parameter.name], BOUNDS[parameter.role]
    for word, candidates in (
        ("smallest", range(value + 1, min(largest, value + _TRIES) + 1)),
        ("largest", range(value - 1, max(least, value - _TRIES) - 1, -1)),
    ):
        for candidate in candidates:
            if _meets_or_fails(tree, {**sizes, parameter.name: candidate}):
                side = "above" if word == "smallest" else "below"
                return f"the {word} {parameter.name} {side} {value} that works is {candidate}"
    return ""


def _meets_or_fails(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> bool:
    try:
        return meets_requirements(tree, sizes)
    except DiagnosticError:
        return False


def meets_requirements(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> bool:
    """Whether every `require` holds, much faster than elaborating to be refused in words.

    Raises `DiagnosticError` where a `let` or a condition above the first that does not hold has no value.
    """
    evaluator = Evaluator(tree.source, sizes, {function.name: function for function in tree.functions})
    scope = Scope(1, dict(sizes))
    for item in lets_and_requires(tree):
        if isinstance(item, t.Let):
            scope.names[item.name] = evaluator.value(item.value, scope)
        elif not evaluator.value(item.condition, scope):
            return False
    return True
