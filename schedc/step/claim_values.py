"""Values of the expressions in claims: over many cost vectors and all ranks at once, as arrays that broadcast."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from schedc.syntax import tree
from schedc.syntax.words import METRICS

TOLERANCE = 1e-9
"""Relative: two values as near as this are equal."""


class NoValue(Exception):
    """The expression at ``node`` has no value at these sizes; the text says why."""

    def __init__(self, node: tree.Expr, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True)
class Environment:
    """What the names of a claim mean.

    names: sizes (numbers), cost symbols ([K, 1]) and the rank variable ([1, P]).
    metric: arrays [K or 1, P], asked for by name, so that nothing is simulated that no claim speaks of.
    magnitude: what the rounding errors of an expression are relative to, besides its own value.
    """

    names: Mapping[str, Any]
    metric: Callable[[str], Any]
    magnitude: Callable[[tree.Expr], Any]


def evaluate(node: tree.Expr, env: Environment) -> Any:
    """The value of ``node``: a number, or an array that broadcasts to [K, P]. Truth values are bools.

    A metric without an index is its largest value over the ranks. Raises `NoValue`.
    """
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return _HANDLERS[type(node)](node, env)
    except (ZeroDivisionError, FloatingPointError, OverflowError) as error:
        raise NoValue(node, f"it cannot be computed: {error}") from error


def expressions_in(node: tree.Expr | None) -> Iterator[tree.Expr]:
    """The expression and all parts of it."""
    if node is not None:
        yield node
        for part in _PARTS.get(type(node), lambda _: ())(node):
            yield from expressions_in(part)


def mentioned(node: tree.Expr | None) -> set[str]:
    """Every name in an expression: sizes, symbols, metrics, variables; not functions."""
    names = {part.id for part in expressions_in(node) if isinstance(part, tree.Name)}
    return names | {part.name for part in expressions_in(node) if isinstance(part, tree.Index)}


_PARTS: Mapping[type, Callable[[Any], tuple[tree.Expr, ...]]] = {
    tree.Unary: lambda node: (node.operand,),
    tree.Binary: lambda node: (node.left, node.right),
    tree.Conditional: lambda node: (node.condition, node.then, node.otherwise),
    tree.Call: lambda node: node.arguments,
    tree.Index: lambda node: (node.index,),
}


def same(left: Any, right: Any, magnitude: Any) -> Any:
    """Whether values are equal within rounding of things of that magnitude, elementwise."""
    scale = np.maximum(np.maximum(np.abs(left), np.abs(right)), magnitude)
    return np.abs(np.subtract(left, right, dtype=np.float64)) <= TOLERANCE * scale


COMPARISONS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "==": same,
    "!=": lambda a, b, m: ~same(a, b, m),
    "<=": lambda a, b, m: np.less_equal(a, b) | same(a, b, m),
    ">=": lambda a, b, m: np.greater_equal(a, b) | same(a, b, m),
    "<": lambda a, b, m: np.less(a, b) & ~same(a, b, m),
    ">": lambda a, b, m: np.greater(a, b) & ~same(a, b, m),
}

_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "and": np.logical_and,
    "or": np.logical_or,
}

_BUILTINS: Mapping[str, Callable[..., Any]] = {
    "min": lambda *values: reduce(np.minimum, values),
    "max": lambda *values: reduce(np.maximum, values),
    "abs": np.abs,
    "ceildiv": lambda value, by: -(-value // by),
}


def _binary(node: tree.Binary, env: Environment) -> Any:
    left, right = evaluate(node.left, env), evaluate(node.right, env)
    if node.op in COMPARISONS:
        return COMPARISONS[node.op](left, right, env.magnitude(node))
    return _ARITHMETIC[node.op](_number(left), _number(right))


def _number(value: Any) -> Any:
    """A truth value counts as 0 or 1 in arithmetic; numpy would refuse to subtract it."""
    return np.add(value, 0) if np.asarray(value).dtype == np.bool_ else value


def _unary(node: tree.Unary, env: Environment) -> Any:
    value = evaluate(node.operand, env)
    return np.logical_not(value) if node.op == "not" else -_number(value)


def _conditional(node: tree.Conditional, env: Environment) -> Any:
    condition = np.asarray(evaluate(node.condition, env))
    if condition.size == 1:  # the other branch may have no value
        return evaluate(node.then if condition.item() else node.otherwise, env)
    return np.where(condition, evaluate(node.then, env), evaluate(node.otherwise, env))


def _name(node: tree.Name, env: Environment) -> Any:
    if node.id in env.names:
        return env.names[node.id]
    if node.id in METRICS:
        return np.max(env.metric(node.id), axis=1, keepdims=True)
    raise NoValue(node, f"`{node.id}` means nothing in a claim")


def _index(node: tree.Index, env: Environment) -> Any:
    if node.name not in METRICS:
        raise NoValue(node, f"`{node.name}` is no metric")
    values, index = env.metric(node.name), np.asarray(evaluate(node.index, env))
    ranks = values.shape[1]
    if index.ndim and index.shape[0] != 1:
        raise NoValue(node.index, "a rank cannot depend on costs")
    if (index != np.floor(index)).any() or (index < 0).any() or (index >= ranks).any():
        raise NoValue(node.index, f"there is no such rank: ranks are 0 to {ranks - 1}")
    return values[:, np.atleast_1d(index.squeeze()).astype(np.int64)]


def _call(node: tree.Call, env: Environment) -> Any:
    arguments = [_number(evaluate(argument, env)) for argument in node.arguments]
    if node.function not in _BUILTINS or not arguments:
        raise NoValue(node, f"`{node.function}` cannot be called so in a claim")
    return _BUILTINS[node.function](*arguments)


_HANDLERS: Mapping[type, Callable[[Any, Environment], Any]] = {
    tree.Int: lambda node, env: node.value,
    tree.Name: _name,
    tree.Unary: _unary,
    tree.Binary: _binary,
    tree.Conditional: _conditional,
    tree.Call: _call,
    tree.Index: _index,
}
