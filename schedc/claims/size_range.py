"""Ranges of sizes as text, such as ``P<=16, M<=4*P``: parsed by the language's grammar, and listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.elaborate.evaluate import Evaluator, Scope
from schedc.elaborate.sizes import unknown_sizes
from schedc.source import Source, Span
from schedc.step.claim_values import expressions_in, mentioned
from schedc.syntax import tree as t
from schedc.syntax.parser import parse
from schedc.syntax.words import BUILTINS

MAX_SIZES = 1_000_000

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}
_BEFORE, _AFTER = "schedule range() { require\n", "\n}"
"""The text around a range that makes it a file. The range begins on a line of its own."""


@dataclass(frozen=True)
class _Bound:
    """A bound ``name op value``. The value may depend on other sizes."""

    name: str
    op: str
    value: t.Expr


def sizes_in(text: str, tree: t.ScheduleTree, chosen: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes of the range, for every parameter of ``tree``, smallest values first.

    A size that the range does not bound keeps the value ``chosen``, else its default. The least value is 1 where the
    range says nothing.

    Raises `DiagnosticError`: S0 for syntax errors, S111 for a given size that ``tree`` has not, S116 for arithmetic.
    S511: this is not a bounded range of these sizes. S512: it has more than `MAX_SIZES` sizes.
    """
    if unknown := unknown_sizes(tree, chosen):
        raise DiagnosticError(unknown)
    source = Source(f"--sweep {text}", text)
    conditions = _parse(source)
    _check_names(conditions, tree, source)
    bounds = [bound for condition in conditions for bound in _bounds(condition)]
    named = {name for condition in conditions for name in mentioned(condition)}
    free = [p.name for p in tree.parameters if p.name in named and p.name not in chosen]
    fixed = dict(chosen)
    for parameter in tree.parameters:
        if parameter.name not in free and parameter.default is not None:
            fixed.setdefault(parameter.name, parameter.default)
    order = _order(free, set(fixed), bounds, source)
    return _listed(_Range(source, conditions, bounds, order), tree, fixed)


def _parse(source: Source) -> tuple[t.Expr, ...]:
    try:
        (parsed,) = parse(Source(source.name, _BEFORE + source.text + _AFTER)).schedules
    except DiagnosticError as error:
        raise DiagnosticError([_moved(d, source) for d in error.diagnostics]) from None
    except ValueError:  # more than one schedule: the text closes the enclosing schedule
        raise _fault("S511", "not a range of sizes", _whole(source), source) from None
    extra = (parsed.lets, parsed.functions, parsed.places, parsed.ranks, parsed.claims, parsed.parameters)
    if any(extra) or not parsed.requires:
        raise _fault("S511", "not a range of sizes", _whole(source), source)
    return tuple(part for require in parsed.requires for part in _conjuncts(require.condition))


def _moved(diagnostic: Diagnostic, source: Source) -> Diagnostic:
    """A finding about the wrapped text, as one about the range. A place behind the range becomes its end."""

    def label(old: Label) -> Label:
        return replace(old, span=_shifted(old.span, source))

    others = tuple(label(secondary) for secondary in diagnostic.secondary)
    if diagnostic.message == "unexpected `;`":
        diagnostic = replace(diagnostic, help="conditions are separated by commas")
    message = diagnostic.message
    if diagnostic.primary.span.line > len(source.lines) + 1:
        message = message.replace("found `}`", "found the end of the range")
    return replace(diagnostic, message=message, primary=label(diagnostic.primary), secondary=others, source=source)


def _shifted(span: Span, source: Source) -> Span:
    last = len(source.lines)
    if 1 < span.line <= last + 1:
        return Span(span.line - 1, span.column, min(span.end_line - 1, last), span.end_column)
    end = len(source.lines[-1]) + 1
    return Span(last, end, last, end + 1)


def _whole(source: Source) -> Span:
    return source.span_at(0, len(source.text))


def _fault(code: str, message: str, span: Span, source: Source, help: str = "") -> DiagnosticError:
    help = help or "write comparisons of sizes: P<=16, M<=4*P"
    return DiagnosticError([Diagnostic(code, message, Label(span), help=help, source=source)])


def _conjuncts(expr: t.Expr) -> Iterator[t.Expr]:
    if isinstance(expr, t.Binary) and expr.op == "and":
        yield from _conjuncts(expr.left)
        yield from _conjuncts(expr.right)
    else:
        yield expr


def _check_names(conditions: tuple[t.Expr, ...], tree: t.ScheduleTree, source: Source) -> None:
    names = [parameter.name for parameter in tree.parameters]
    findings = []
    for part in (part for condition in conditions for part in expressions_in(condition)):
        place = _shifted(part.span, source)
        if isinstance(part, t.Name) and part.id not in names:
            help = did_you_mean(part.id, names)
            findings.append(Diagnostic("S511", f"`{tree.name}` has no size `{part.id}`", Label(place), help=help))
        elif isinstance(part, t.Call):
            least, most = BUILTINS.get(part.function, (1, 0))
            if not least <= len(part.arguments) <= most:
                findings.append(Diagnostic("S511", f"`{part.function}` cannot be called so in a range", Label(place)))
        elif isinstance(part, t.Index) or (isinstance(part, t.Int) and isinstance(part.value, float)):
            findings.append(Diagnostic("S511", "this means nothing in a range of sizes", Label(place)))
    if findings:
        raise DiagnosticError([replace(d, source=source) for d in findings])


def _bounds(condition: t.Expr) -> Iterator[_Bound]:
    """The bounds of a comparison on sizes that are alone on one side of it."""
    if isinstance(condition, t.Binary) and condition.op in _FLIPPED:
        for side, bound, op in (
            (condition.left, condition.right, condition.op),
            (condition.right, condition.left, _FLIPPED[condition.op]),
        ):
            if isinstance(side, t.Name) and side.id not in mentioned(bound):
                yield _Bound(side.id, op, bound)


def _order(free: list[str], bounded: set[str], bounds: list[_Bound], source: Source) -> list[str]:
    """The sizes in an order in which each has an upper bound in terms of those before it."""
    order: list[str] = []
    while len(order) < len(free):
        ready = [
            name
            for name in free
            if name not in order
            and any(b.name == name and b.op in ("<", "<=", "==") and mentioned(b.value) <= bounded for b in bounds)
        ]
        if not ready:
            loose = next(name for name in free if name not in order)
            help = f"bound it: {loose}<=16, or give it: -D {loose}=4"
            raise _fault("S511", f"the range has no upper bound of `{loose}`", _whole(source), source, help)
        order.append(ready[0])
        bounded = bounded | {ready[0]}
    return order


@dataclass(frozen=True)
class _Range:
    source: Source
    conditions: tuple[t.Expr, ...]
    bounds: list[_Bound]
    order: list[str]

    def value(self, expr: t.Expr, values: Mapping[str, int]) -> int:
        try:
            result = Evaluator(self.source, values).value(expr, Scope(1, dict(values)))
        except DiagnosticError as error:
            raise DiagnosticError([_moved(d, self.source) for d in error.diagnostics]) from None
        return int(result)

    def ends(self, name: str, values: Mapping[str, int]) -> tuple[int, int]:
        """(least, largest) value of a size, given the values of those before it."""
        usable = [b for b in self.bounds if b.name == name and mentioned(b.value) <= set(values)]
        bounds = [(bound.op, self.value(bound.value, values)) for bound in usable]
        lower = [value + (op == ">") for op, value in bounds if op in (">", ">=", "==")]
        return max([1, *lower]), min(value - (op == "<") for op, value in bounds if op in ("<", "<=", "=="))


def _listed(chosen: _Range, tree: t.ScheduleTree, fixed: dict[str, int]) -> Iterator[dict[str, int]]:
    names = [parameter.name for parameter in tree.parameters]
    partial = [fixed]
    for name in chosen.order:
        longer: list[dict[str, int]] = []
        for values in partial:
            low, high = chosen.ends(name, values)
            if len(longer) + high - low + 1 > MAX_SIZES:
                message = f"the range holds more than {MAX_SIZES:,} sizes"
                raise _fault("S512", message, _whole(chosen.source), chosen.source, "bound the sizes more tightly")
            longer += [{**values, name: value} for value in range(low, high + 1)]
        partial = longer
    for values in partial:
        if all(chosen.value(condition, values) for condition in chosen.conditions):
            yield {name: values[name] for name in names if name in values}
