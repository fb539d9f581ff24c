"""Walks over the tree: parts of expressions, ops of pairs, and the names that a rank block defines."""

from __future__ import annotations

from collections.abc import Iterable

from schedc.ir.ops import PAIR_NAMES
from schedc.syntax import tree as t

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})


def parts(expr: t.Expr) -> tuple[t.Expr, ...]:
    """The direct parts of an expression. The index of a metric is not among them: it only names a rank."""
    match expr:
        case t.Unary(operand=operand):
            return (operand,)
        case t.Binary(left=left, right=right):
            return (left, right)
        case t.Conditional(condition=condition, then=then, otherwise=otherwise):
            return (condition, then, otherwise)
        case t.Call(arguments=arguments):
            return arguments
        case _:
            return ()


def indexes(expr: t.Expr) -> list[t.Index]:
    """Every ``metric[r]`` in an expression."""
    own = [expr] if isinstance(expr, t.Index) else []
    return own + [index for part in parts(expr) for index in indexes(part)]


def is_statement(expr: t.Expr) -> bool:
    """Whether an expression is a comparison, or comparisons joined by ``and``, ``or`` and ``not``."""
    match expr:
        case t.Unary(op="not", operand=operand):
            return is_statement(operand)
        case t.Binary(op="and" | "or", left=left, right=right):
            return is_statement(left) and is_statement(right)
        case t.Binary(op=op):
            return op in COMPARISONS
        case _:
            return False


def in_order(pair: t.PairItem) -> tuple[t.OpItem, t.OpItem]:
    """Both ops as a schedule lists them, in any order of the text: a forward first, a weight gradient last."""
    turned = f"{pair.second.kind}{pair.first.kind}" in PAIR_NAMES
    return (pair.second, pair.first) if turned else (pair.first, pair.second)


def bound_in(blocks: Iterable[t.RankBlock]) -> set[str]:
    """Every name that a rank block defines: the variable, `let`s and loop variables."""

    def names(statements: Iterable[t.Statement]) -> set[str]:
        bound: set[str] = set()
        for statement in statements:
            match statement:
                case t.Let(name=name):
                    bound.add(name)
                case t.For(name=name, body=body):
                    bound |= {name} | names(body)
                case t.Phase(body=body) | t.Repeat(body=body) | t.Timed(body=body):
                    bound |= names(body)
                case t.Policy(choices=choices):
                    bound |= {name for choice in choices for name in names(choice.body)}
                case t.If(then=then, otherwise=otherwise):
                    bound |= names(then) | names(otherwise)
        return bound

    return {name for block in blocks for name in {block.variable} | names(block.body)}
