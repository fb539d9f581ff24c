"""Binds the sizes of a schedule, the caller's or the defaults, and proposes others when a `require` fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError, did_you_mean
from schedc.elaborate.evaluate import MAX_VALUE, Evaluator, Scope
from schedc.elaborate.place import MAX_STAGES
from schedc.syntax import tree as t
from schedc.syntax.input import Input
from schedc.units import equations

MAX_MICROBATCHES = 65_536

BOUNDS: dict[str, tuple[int, int]] = {
    "ranks": (1, 4_096),
    "microbatches": (1, MAX_MICROBATCHES),
    "chunks": (1, MAX_STAGES),
    "segments": (1, 64),
    "count": (0, MAX_VALUE),
}
"""By role of a size: the least and the largest value."""

_TRIES = 256
"""Values of one size, on each side of the one that fails, among which a hint is sought."""


def parameter_of_role(tree: Input, wanted: str) -> t.SizeParameter:
    """The parameter with a role. `check` guarantees a parameter for ranks, and a parameter for microbatches."""
    return next(parameter for parameter in tree.parameters if parameter.role == wanted)


def segments_per_microbatch(tree: Input, sizes: Mapping[str, int]) -> int:
    """Number of segments of each microbatch; 1 where no size has the role `segments`."""
    return next((sizes[parameter.name] for parameter in tree.parameters if parameter.role == "segments"), 1)


def bind_sizes(tree: t.ScheduleTree, given: Mapping[str, int]) -> dict[str, int]:
    """Every parameter with its value. given: the sizes that the caller gave.

    Raises `DiagnosticError` with all unknown, missing and illegal sizes (S111, S112, S113). It is a `RequestError`
    if no default of the file is among them.
    """
    findings = unknown_sizes(tree, given)
    by_request = True
    bound: dict[str, int] = {}
    for parameter in tree.parameters:
        value = given.get(parameter.name, parameter.default)
        least, largest = BOUNDS[parameter.role]
        label = Label(parameter.span, f"a number of {parameter.role}" if parameter.role != "count" else "")
        if value is None:
            message = f"the size `{parameter.name}` has no default and was not given"
            help = f"give it: -D {parameter.name}={least if parameter.role != 'ranks' else 4}"
            findings.append(Diagnostic("S112", message, label, help=help, source=tree.source))
        elif not hasattr(value, "__index__"):
            findings.append(
                Diagnostic("S113", f"{parameter.name} = {value!r} is no whole number", label, source=tree.source)
            )
        elif not least <= value <= largest:
            by_request = by_request and parameter.name in given
            message = f"{parameter.name} = {value} is not between {least} and {largest:,}"
            findings.append(Diagnostic("S113", message, label, source=tree.source))
        else:
            bound[parameter.name] = int(value)
    if not findings:
        findings, by_request = _too_many_segments(tree, bound), differ_from_defaults(tree, bound)
    if findings:
        raise (RequestError if by_request else DiagnosticError)(findings)
    return bound


def unknown_sizes(tree: t.ScheduleTree, given: Iterable[str]) -> list[Diagnostic]:
    """A finding (S111) for each name that is not a size of ``tree``."""
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
    """Whether some size is not the default of the file. A failure is then the request's fault, not the file's."""
    return any(sizes[parameter.name] != parameter.default for parameter in tree.parameters)


def _too_many_segments(tree: t.ScheduleTree, sizes: Mapping[str, int]) -> list[Diagnostic]:
    """A finding (S113) if the segments of all microbatches are more than `MAX_MICROBATCHES`."""
    total = sizes[parameter_of_role(tree, "microbatches").name] * segments_per_microbatch(tree, sizes)
    if total <= MAX_MICROBATCHES:
        return []
    span = next(parameter.span for parameter in tree.parameters if parameter.role == "segments")
    message = f"{total:,} segments of microbatches; there may be {MAX_MICROBATCHES:,}"
    return [Diagnostic("S113", message, Label(span), source=tree.source)]


def unmet_requirement(tree: t.ScheduleTree, require: t.Require, sizes: Mapping[str, int]) -> Diagnostic:
    """The finding (S114) for a `require` that does not hold, with the nearest sizes that meet it."""
    message = f"`{tree.name}` requires {require.text}, which does not hold for {equations(sizes)}"
    hints = (_hint(tree, sizes, parameter) for parameter in _most_easily_changed(tree))
    help = next((hint for hint in hints if hint), "")
    return Diagnostic("S114", message, Label(require.span), help=help, source=tree.source)


def lets_and_requires(tree: t.ScheduleTree) -> list[t.Let | t.Require]:
    """The `let`s and `require`s of the schedule in the order of the text: each may use all earlier lines."""
    items: list[t.Let | t.Require] = [*tree.lets, *tree.requires]
    return sorted(items, key=lambda item: item.span)


def _most_easily_changed(tree: t.ScheduleTree) -> Iterator[t.SizeParameter]:
    order = ("microbatches", "count", "segments", "chunks", "ranks")
    yield from sorted(tree.parameters, key=lambda parameter: order.index(parameter.role))


def _hint(tree: t.ScheduleTree, sizes: Mapping[str, int], parameter: t.SizeParameter) -> str:
    """The nearest larger value of one size, or else the nearest smaller, with which every `require` holds."""
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
    """Whether every `require` holds. Much faster than an elaboration that is refused.

    Raises `DiagnosticError` if a `let` or a condition has no value, unless a `require` above it fails.
    """
    evaluator = Evaluator(tree.source, sizes, {function.name: function for function in tree.functions})
    scope = Scope(1, dict(sizes))
    for item in lets_and_requires(tree):
        if isinstance(item, t.Let):
            scope.names[item.name] = evaluator.value(item.value, scope)
        elif not evaluator.value(item.condition, scope):
            return False
    return True
