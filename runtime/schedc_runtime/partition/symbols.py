"""Symbols in place of sizes of a batch while a model is recorded, and the conditions under which the recording holds.

    tokens [4, s1]      Python and fake tensors compute with s1: torch.arange(s1 // 2), x[:, : s1 - 1]
    if s1 > 64: ...     becomes a condition: the recording holds for sizes of which it is true

What Python makes of a symbol is an expression of it, or a plain number; then the condition is that very size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType
from typing import Any, Protocol

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import Tensor, fx, nn
from torch._guards import Source
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatPow,
    FloatTrueDiv,
    FloorToInt,
    IntTrueDiv,
    RoundToInt,
    ToFloat,
    TruncToInt,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from schedc_runtime.partition.boundary import TensorSpec

Sizes = tuple[tuple[int, ...], ...]
"""The shape of each tensor of a batch, in the order of its leaves."""
Places = frozenset[tuple[int, int]]
"""(leaf, dimension) of sizes of a batch."""
Values = Mapping[str, int]
"""The size that each symbol has in a batch, by name."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_EXACT = (IntTrueDiv, FloatTrueDiv, FloatPow, ToFloat, FloorToInt, CeilToInt, RoundToInt, TruncToInt)
"""Functions of floats that an expression keeps as Python ran them. It may regroup sums and products of floats."""


class NotSymbolic(Exception):
    """A recording with symbols cannot hold for other sizes. The model is recorded for the sizes as they are."""


class SizeTerm:
    """A number in a recording that follows from sizes of the batch."""

    __slots__ = ("_code", "text")

    def __init__(self, expression: sympy.Expr) -> None:
        """Raises `NotSymbolic` where the expression may be rounded otherwise than Python's computation."""
        self.text = _printed(expression)
        self._code = _compiled(self.text)

    def at(self, values: Values) -> Any:
        """The number, for these sizes."""
        return eval(self._code, {**SYMPY_INTERP, **values})

    def __repr__(self) -> str:
        return self.text


def exact(expression: sympy.Basic) -> bool:
    """Whether an expression is computed as Python has computed it, operation by operation."""
    whole = isinstance(expression, (*_EXACT, Boolean)) or all(part.is_integer for part in expression.args)
    return whole and all(map(exact, expression.args))


def _printed(expression: sympy.Basic) -> str:
    if not exact(expression):
        raise NotSymbolic(f"{expression} may be rounded in another way than Python does")
    return str(PythonPrinter().doprint(expression))


Left = tuple[nn.Module, str, SizeTerm]
"""An attribute of a module."""


def settled(value: Any, values: Values) -> Any:
    """``value`` with numbers for each `SizeTerm` and symbol, inside tuples, lists, dicts, slices and specs."""
    if isinstance(value, SizeTerm):
        return value.at(values)
    if isinstance(value, SYMBOLIC):
        return SizeTerm(value.node.expr).at(values)
    if isinstance(value, TensorSpec):
        return replace(value, shape=settled(value.shape, values))
    if isinstance(value, slice):
        return slice(*(settled(bound, values) for bound in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: settled(item, values) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        kind = list if isinstance(value, list) else tuple
        return kind(settled(item, values) for item in value)
    return value


def has_sizes(node: fx.Node) -> bool:
    """Whether a `SizeTerm` is among the arguments of a node."""
    leaves: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    return any(isinstance(leaf, SizeTerm) for leaf in leaves)


@dataclass(frozen=True)
class _Place(Source):
    """Tells torch where a symbol is from: its name follows from that."""

    leaf: int
    dim: int

    @property
    def _name_template(self) -> str:
        return f"size_{self.leaf}_{self.dim}"


class Symbols:
    """The symbols of one recording."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._symbols: dict[tuple[int, int], torch.SymInt] = {}
        self.hints: dict[str, int] = {}
        """The sizes of the recording itself."""
        self.left: list[Left] = []
        """What units have kept of sizes."""

    def shape(self, leaf: int, shape: Sequence[int], varying: Places) -> tuple[Any, ...]:
        """The shape of the tensor ``leaf`` of the batch, with symbols for its ``varying`` sizes, all above 1."""
        return tuple(
            self._symbol(leaf, dim, size) if (leaf, dim) in varying else size for dim, size in enumerate(shape)
        )

    def _symbol(self, leaf: int, dim: int, hint: int) -> torch.SymInt:
        source = _Place(leaf, dim)
        symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        number = self.env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(number, torch.SymInt)
        self._symbols[leaf, dim] = number
        self.hints[str(symbol)] = hint
        return number

    def conditions(self, sizes: Sizes, questions: Sequence[Asked]) -> Conditions:
        """What has been found out so far. sizes: those of the recording. Raises `NotSymbolic` if only these fit.

        questions: see `Conditions`.
        """
        names = {place: str(number.node._expr) for place, number in self._symbols.items()}
        tests = [_printed(guard.expr) for guard in self.env.guards]
        for symbol, bounds in self.env.var_to_range.items():
            tests += [f"{bounds.lower} <= {symbol}"] + [f"{symbol} <= {bounds.upper}"] * (bounds.upper != int_oo)
        fixed = {str(symbol) for symbol, value in self.env.replacements.items() if value.is_number}
        conditions = Conditions(sizes, names, tuple(dict.fromkeys(tests)), tuple(questions), self.left)
        if fixed >= self.hints.keys() or conditions.values(sizes) is None:
            raise NotSymbolic(f"only the sizes {sizes} fulfil {' and '.join(conditions.tests)}")
        return conditions


class Asked(Protocol):
    """A question that was answered: ``ask`` gives the answer for other sizes."""

    @property
    def ask(self) -> Callable[[Values], Any]: ...

    @property
    def answer(self) -> Any: ...


def same_answer(a: Any, b: Any) -> bool:
    """Whether two numbers, or lists of numbers, are equal and of one type."""
    return type(a) is type(b) and repr(a) == repr(b)


@dataclass(frozen=True)
class Conditions:
    """The batches that a recording holds for.

    sizes: of the recorded batch. names: the symbol of each (leaf, dimension) that may be another. tests: Python
    expressions of symbols, all of which are true. questions: what was asked of values that follow from sizes, which
    must have the same answers. left: what units have kept of sizes, in attributes.
    """

    sizes: Sizes
    names: Mapping[tuple[int, int], str]
    tests: tuple[str, ...] = field(repr=False)
    questions: Sequence[Asked] = field(default=(), repr=False)
    left: Sequence[Left] = field(default=(), repr=False)

    def leave(self, values: Values) -> None:
        """Leave in the attributes of units what a recording of these sizes leaves there."""
        for module, key, size in self.left:
            vars(module)[key] = size.at(values)

    @cached_property
    def _test(self) -> CodeType:
        return _compiled(" and ".join(f"({test})" for test in self.tests) or "True")

    def values(self, sizes: Sizes) -> Values | None:
        """The symbols' values for a batch of these sizes; None where the recording does not hold for it."""
        if differing_sizes(self.sizes, sizes) - self.names.keys():
            return None
        values = {name: sizes[leaf][dim] for (leaf, dim), name in self.names.items()}
        try:
            holds = eval(self._test, {**SYMPY_INTERP, **values}) and all(
                same_answer(question.ask(values), question.answer) for question in self.questions
            )
        except (ArithmeticError, ValueError, RuntimeError):
            return None
        return values if holds else None


def sizes_of_symbols(leaves: Sequence[Any]) -> Sizes:
    """The shape of each tensor, or `TensorSpec`, among the leaves of a batch; () for other leaves."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, (Tensor, TensorSpec)) else () for leaf in leaves)


def differing_sizes(a: Sizes, b: Sizes) -> Places:
    """The places in which two batches of one form differ."""
    return frozenset(
        (leaf, dim)
        for leaf, shapes in enumerate(zip(a, b, strict=True))
        for dim, (own, other) in enumerate(zip(*shapes, strict=True))
        if own != other
    )


def _compiled(text: str) -> CodeType:
    return compile(text, "<sizes of a batch>", "eval")
