"""Conditions on the axes of plans, for `--require`, `--exclude`, `--restrict`: read from text, decided on columns."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from schedc.diagnostics import Diagnostic, Label, RequestError, did_you_mean
from schedc.ir.arrays import Bools
from schedc.planner.presets.tables import tables
from schedc.planner.space.axes import TITLES, VALUES
from schedc.source import NOWHERE, Source

REQUIRE, EXCLUDE = "--require", "--exclude"
"""Options that ask for conditions."""

MAX_TEXT = 500
"""Characters of a condition."""

NUMBERS = (
    *("tp", "cp", "pp", "vpp", "ep", "dp", "zero", "microbatch", "microbatches", "limit", "overlap"),
    *("devices", "batch", "spare"),
)
WORDS = ("schedule", "recompute", "where", "layout", "alltoall")

INNER = frozenset({"zero", "schedule", "limit", "recompute", "where", "layout", "alltoall", "overlap"})
"""Axes inside of those that a prefix of the space has."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: np.floor_divide(a, np.where(np.equal(b, 0), 1, b)),
    ast.Mod: lambda a, b: np.mod(a, np.where(np.equal(b, 0), 1, b)),
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}
_SIGNS = "comparisons (`<`, `<=`, `==`, `!=`, `>`, `>=`, `in`), `and`, `or`, `not`, `+ - * // %`"


_DIGITS_FIRST = re.compile(r"(?<![\w'\"])[0-9]+[A-Za-z]\w*")
"""Names such as ``1f1b``."""

_LETTERS = 0x2C30
"""The first of ten letters that replace a leading digit while Python's parser reads a name."""


Evaluated: TypeAlias = Callable[[Mapping[str, Any]], Any]
"""The value of a part of a condition, by the values of axes."""


@dataclass(frozen=True)
class PlanCondition:
    """A condition on plans.

    text: as written. by: the option with the text; `--exclude` leaves plans that do not meet the text. names: the axes
    that it reads. met: whether plans meet the text.
    """

    text: str
    by: str
    names: frozenset[str]
    met: Evaluated = field(compare=False, repr=False)

    @property
    def option(self) -> str:
        return f"{self.by} '{self.text}'"

    def holds(self, axes: Mapping[str, Any]) -> Bools:
        """[plans] whether the condition leaves plans in. axes: by axis, values of plans, or arrays that broadcast."""
        met: Bools = np.asarray(self.met(axes), np.bool_)
        return ~met if self.by == EXCLUDE else met


def read_condition(text: str, by: str = REQUIRE, schedules: tuple[str, ...] = ()) -> PlanCondition:
    """The condition of a text such as ``pp >= 4 and schedule in dualpipev, zbv``.

    schedules: names of schedules, to tell a misspelt one. Raises `RequestError` (S711) with the place of a fault.
    """
    text = text.strip()
    source = Source(by, text)
    if not text.isprintable() or not 0 < len(text) <= MAX_TEXT:
        raise _fault(source, None, f"a condition is one line of at most {MAX_TEXT:,} characters", "write `pp >= 4`")
    try:
        tree = ast.parse(_DIGITS_FIRST.sub(lambda name: _as_letter(name[0]), text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        before = text[: max((getattr(error, "offset", None) or 1) - 1, 0)]
        place = len(_DIGITS_FIRST.sub(lambda name: _as_letter(name[0]), before).encode())
        raise _fault(source, place, "this is no condition", f"write it with axes, {_SIGNS}") from None
    tree = _joined(tree)
    met = _ConditionReader(source, schedules).truth(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return PlanCondition(text, by, frozenset(names & {*NUMBERS, *WORDS}), met)


def _joined(tree: ast.expr) -> ast.expr:
    """``schedule in a, b`` parses as a tuple of a comparison and ``b``: gathers the names into a list."""
    if not isinstance(tree, ast.Tuple) or not tree.elts:
        return tree
    head, *others = tree.elts
    owner = head.values[-1] if isinstance(head, ast.BoolOp) else head
    if isinstance(owner, ast.Compare) and isinstance(owner.ops[-1], ast.In | ast.NotIn):
        owner.comparators[-1] = ast.copy_location(
            ast.Tuple([owner.comparators[-1], *others], ast.Load()), owner.comparators[-1]
        )
        return head
    return tree


@dataclass(frozen=True)
class _ConditionReader:
    """Makes functions of the parts of a tree, and refuses what has no value."""

    source: Source
    schedules: tuple[str, ...]

    def truth(self, node: ast.expr) -> Evaluated:
        match node:
            case ast.BoolOp(op=op, values=values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                parts = [self.truth(value) for value in values]
                return lambda axes: reduce(join, (part(axes) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand)
                return lambda axes: np.logical_not(inner(axes))
            case ast.Compare(left=left, ops=signs, comparators=others):
                sides = pairwise([left, *others])
                parts = [self.comparison(sign, *pair) for sign, pair in zip(signs, sides, strict=True)]
                return lambda axes: reduce(np.logical_and, (part(axes) for part in parts))
            case ast.Name(id="overlap"):
                return operator.itemgetter("overlap")
            case _:
                raise self.fault(node, "this has no truth", "compare an axis with something")

    def comparison(self, sign: ast.cmpop, left: ast.expr, right: ast.expr) -> Evaluated:
        if isinstance(sign, ast.In | ast.NotIn):
            inside = self.membership(left, right)
            return inside if isinstance(sign, ast.In) else lambda axes: np.logical_not(inside(axes))
        pairs = ((left, right), (right, left))
        words = [(axis.id, value) for axis, value in pairs if isinstance(axis, ast.Name) and axis.id in WORDS]
        if words and not isinstance(sign, ast.Eq | ast.NotEq):
            raise self.fault(right, "names have no order", "compare them by `==`, `!=` or `in`")
        first: Evaluated
        if words:
            first, second = operator.itemgetter(words[0][0]), self.value_of(*words[0])
        else:
            first, second = self.number(left), self.number(right)
        compare = _COMPARISONS.get(type(sign))
        if compare is None:
            raise self.fault(right, "this comparison is not known here", f"known are {_SIGNS}")
        return lambda axes: compare(first(axes), second(axes))

    def membership(self, left: ast.expr, right: ast.expr) -> Evaluated:
        if not isinstance(left, ast.Name):
            raise self.fault(left, "`in` takes an axis on its left", "write `schedule in dualpipev, zbv`")
        items = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]
        word = left.id in WORDS
        axis = operator.itemgetter(left.id) if word else self.number(left)
        values = [self.value_of(left.id, item) if word else self.number(item) for item in items]
        return lambda axes: reduce(np.logical_or, (np.equal(axis(axes), value(axes)) for value in values), False)

    def value_of(self, axis: str, node: ast.expr) -> Evaluated:
        name = _text(node)
        if name is None:
            raise self.fault(node, f"`{axis}` is compared with a name", f"write `{axis} == NAME`")
        known = self.schedules if axis == "schedule" else VALUES[axis]
        if known and name not in known:
            raise self.fault(node, f"`{axis}` has no value `{name}`", did_you_mean(name, known))
        return lambda _axes: name

    def number(self, node: ast.expr) -> Evaluated:
        match node:
            case ast.Constant(value=int() as number):
                if number > 2**40:
                    raise self.fault(node, "this number is too large", "axes have small values")
                return lambda _axes: number
            case ast.Name(id=name) if name in NUMBERS:
                return operator.itemgetter(name)
            case ast.Name(id=name):
                axis = next((axis for axis, title in TITLES.items() if title == name), "")
                known = f"the column `{name}` is the axis `{axis}`" if axis else did_you_mean(name, (*NUMBERS, *WORDS))
                raise self.fault(node, f"there is no axis `{name}`", known)
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _ARITHMETIC:
                combine, first, second = _ARITHMETIC[type(op)], self.number(left), self.number(right)
                return lambda axes: combine(first(axes), second(axes))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.number(operand)
                return lambda axes: -inner(axes)
            case _:
                raise self.fault(node, "this is no number", f"known are axes, whole numbers, {_SIGNS}")

    def fault(self, node: ast.expr, message: str, help: str) -> RequestError:
        return _fault(self.source, node.col_offset, message, help, node.end_col_offset)


def _fault(source: Source, start: int | None, message: str, help: str = "", end: int | None = None) -> RequestError:
    if start is None or not source.text:
        return RequestError([Diagnostic("S711", message, Label(NOWHERE), help=help, source=source)])
    start, end = (_characters(source.text, at) for at in (start, end or 0))
    start = min(max(start, 0), len(source.text) - 1)
    span = source.span_at(start, min(max(end, start + 1), len(source.text)))
    return RequestError([Diagnostic("S711", message, Label(span), help=help, source=source)])


def _as_letter(name: str) -> str:
    return chr(_LETTERS + int(name[0])) + name[1:]


def _characters(text: str, offset: int) -> int:
    """The character at an offset in bytes of what Python's parser was given."""
    read = _DIGITS_FIRST.sub(lambda name: _as_letter(name[0]), text)
    return len(read.encode()[:offset].decode(errors="ignore"))


def _text(node: ast.expr) -> str | None:
    """The name that a node writes, bare or quoted."""
    match node:
        case ast.Name(id=name):
            digit = ord(name[0]) - _LETTERS
            return f"{digit}{name[1:]}" if 0 <= digit < 10 else name
        case ast.Constant(value=str() as text):
            return text
        case _:
            return None


# Named sets of conditions for `--restrict`: what one software stack has. Each is a shipped file.


@dataclass(frozen=True)
class Restriction:
    """A named set of conditions. says: the property of plans that meet all conditions. source: where that is from."""

    name: str
    says: str
    source: str
    conditions: tuple[PlanCondition, ...]


def open_restriction(name: str) -> Restriction:
    """The set of a name. Raises `RequestError` (S713) for another name."""
    shipped = tables("restrictions")
    if name not in shipped:
        message = f"there is no restriction `{name}`"
        raise RequestError([Diagnostic("S713", message, help=did_you_mean(name, shipped))])
    table = shipped[name]
    conditions = tuple(read_condition(text, f"--restrict {name}:") for text in table["conditions"])
    return Restriction(name, table["says"], table["source"], conditions)
