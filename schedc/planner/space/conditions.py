"""Conditions on the axes of plans, as `--require` and `--exclude` take them: read from text, decided on columns."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.diagnostics import Diagnostic, Label, RequestError, did_you_mean
from schedc.ir.arrays import Bools
from schedc.source import NOWHERE, Source

MAX_TEXT = 500
"""Characters of a condition."""

NUMBERS = (
    *("tp", "cp", "pp", "vpp", "ep", "dp", "zero", "microbatch", "microbatches", "limit", "overlap"),
    *("devices", "batch"),
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
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
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


@dataclass(frozen=True)
class PlanCondition:
    """A condition on plans. text: as written. wanted: whether plans meet it (`--require`) or do not (`--exclude`)."""

    text: str
    wanted: bool
    tree: ast.expr

    @property
    def names(self) -> frozenset[str]:
        """The axes that it reads."""
        known = frozenset((*NUMBERS, *WORDS))
        return frozenset(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)) & known

    @property
    def option(self) -> str:
        return f"--{'require' if self.wanted else 'exclude'} '{self.text}'"

    def holds(self, axes: Mapping[str, Any]) -> Bools:
        """[plans] whether the condition leaves plans in. axes: by axis, values of plans, or arrays that broadcast."""
        met: Bools = np.asarray(_value(self.tree, axes), np.bool_)
        return met if self.wanted else ~met


def read_condition(text: str, wanted: bool = True, schedules: tuple[str, ...] = ()) -> PlanCondition:
    """The condition of a text such as ``pp >= 4 and schedule in dualpipev, zbv``.

    schedules: names of schedules, to tell a misspelt one. Raises `RequestError` (S711) with the place of a fault.
    """
    text = text.strip()
    source = Source("--require" if wanted else "--exclude", text)
    if not text.isprintable() or not 0 < len(text) <= MAX_TEXT:
        raise _fault(source, None, f"a condition is one line of at most {MAX_TEXT:,} characters", "write `pp >= 4`")
    try:
        tree = ast.parse(_DIGITS_FIRST.sub(lambda name: _as_letter(name[0]), text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        before = text[: max((getattr(error, "offset", None) or 1) - 1, 0)]
        place = len(_DIGITS_FIRST.sub(lambda name: _as_letter(name[0]), before).encode())
        raise _fault(source, place, "this is no condition", f"write it with axes, {_SIGNS}") from None
    tree = _joined(tree)
    _ConditionCheck(source, schedules).truth(tree)
    return PlanCondition(text, wanted, tree)


def _joined(tree: ast.expr) -> ast.expr:
    """``schedule in a, b`` parses as a tuple of a comparison and ``b``: its names are gathered into one list."""
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
class _ConditionCheck:
    """Checks a tree, so that evaluation meets nothing unknown."""

    source: Source
    schedules: tuple[str, ...]

    def truth(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(values=values):
                for value in values:
                    self.truth(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.truth(operand)
            case ast.Compare():
                self.comparison(node)
            case ast.Name(id="overlap"):
                pass
            case _:
                raise self.fault(node, "this has no truth", "compare an axis with something")

    def comparison(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for sign, right in zip(node.ops, node.comparators, strict=True):
            word = next((side.id for side in (left, right) if isinstance(side, ast.Name) and side.id in WORDS), "")
            if isinstance(sign, ast.In | ast.NotIn):
                self.membership(left, right, word)
            elif word:
                self.word(left, right, sign)
            else:
                self.number(left)
                self.number(right)
                if not isinstance(sign, (*_ORDER, ast.Eq, ast.NotEq)):
                    raise self.fault(right, "this comparison is not known here", f"known are {_SIGNS}")
            left = right

    def membership(self, left: ast.expr, right: ast.expr, word: str) -> None:
        items = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]
        if not isinstance(left, ast.Name):
            raise self.fault(left, "`in` takes an axis on its left", "write `schedule in dualpipev, zbv`")
        for item in items:
            if word:
                self.value_of(left.id, item)
            else:
                self.number(item)
        if not word:
            self.number(left)

    def word(self, left: ast.expr, right: ast.expr, sign: ast.cmpop) -> None:
        if not isinstance(sign, ast.Eq | ast.NotEq):
            raise self.fault(right, "names have no order", "compare them by `==`, `!=` or `in`")
        axis, value = (left, right) if isinstance(left, ast.Name) and left.id in WORDS else (right, left)
        assert isinstance(axis, ast.Name)
        self.value_of(axis.id, value)

    def value_of(self, axis: str, node: ast.expr) -> None:
        name = _text(node)
        if name is None:
            raise self.fault(node, f"`{axis}` is compared with a name", f"write `{axis} == NAME`")
        known = self.schedules if axis == "schedule" else VALUES[axis]
        if known and name not in known:
            raise self.fault(node, f"`{axis}` has no value `{name}`", did_you_mean(name, known))

    def number(self, node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int() as number):
                if number > 2**40:
                    raise self.fault(node, "this number is too large", "axes have small values")
            case ast.Name(id=name) if name in NUMBERS:
                pass
            case ast.Name(id=name):
                raise self.fault(node, f"there is no axis `{name}`", did_you_mean(name, (*NUMBERS, *WORDS)))
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _ARITHMETIC:
                self.number(left)
                self.number(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.number(operand)
            case _:
                raise self.fault(node, "this is no number", f"known are axes, whole numbers, {_SIGNS}")

    def fault(self, node: ast.expr, message: str, help: str) -> RequestError:
        return _fault(self.source, node.col_offset, message, help, node.end_col_offset)


VALUES: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "norm", "act", "light", "medium", "full", "layer"),
    "where": ("all", "chunk0", "first_half"),
    "layout": ("even", "balanced", "apart"),
    "alltoall": ("flat", "hierarchical", "allgather"),
}
"""The values of the axes that have names, schedules apart."""


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


def _value(node: ast.expr, axes: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return axes[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, axes))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, axes)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_value(left, axes), _value(right, axes))
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            result = _value(values[0], axes)
            for value in values[1:]:
                result = join(result, _value(value, axes))
            return result
        case _:
            assert isinstance(node, ast.Compare)
            return _compared(node, axes)


def _compared(node: ast.Compare, axes: Mapping[str, Any]) -> Any:
    result: Any = True
    left = node.left
    for sign, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(sign, ast.In | ast.NotIn):
            items = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]
            inside: Any = False
            for item in items:
                inside = np.logical_or(inside, _equal(left, item, axes))
            one = inside if isinstance(sign, ast.In) else np.logical_not(inside)
        elif isinstance(sign, ast.Eq | ast.NotEq):
            same = _equal(left, right, axes)
            one = same if isinstance(sign, ast.Eq) else np.logical_not(same)
        else:
            one = _ORDER[type(sign)](_value(left, axes), _value(right, axes))
        result = np.logical_and(result, one)
        left = right
    return result


def _equal(left: ast.expr, right: ast.expr, axes: Mapping[str, Any]) -> Any:
    for axis, other in ((left, right), (right, left)):
        if isinstance(axis, ast.Name) and axis.id in WORDS:
            return np.equal(axes[axis.id], _text(other) or "")
    return np.equal(_value(left, axes), _value(right, axes))
