"""Walks over the tree: the parts of an expression, and the names that a rank block gives."""

from __future__ import annotations

from collections.abc import Iterable

from schedc.syntax import tree as t

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})


def parts(expr: t.Expr) -> tuple[t.Expr, ...]:
    """The expressions that ``expr`` is made of; none for the index of a metric, which only names a rank."""
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
    """Whether an expression says something that is true or false."""
    match expr:
        case t.Unary(op="not", operand=operand):
            return is_statement(operand)
        case t.Binary(op="and" | "or", left=left, right=right):
            return is_statement(left) and is_statement(right)
        case t.Binary(op=op):
            return op in COMPARISONS
        case _:
            return False


def bound_in(blocks: Iterable[t.RankBlock]) -> set[str]:
    """Every name that a rank block gives: its variable, its `let`s and its loop variables."""

    def names(statements: Iterable[t.Statement]) -> set[str]:
        found: set[str] = set()
        for statement in statements:
            match statement:
                case t.Let(name=name):
                    found.add(name)
                case t.For(name=name, body=body):
                    found |= {name} | names(body)
                case t.Phase(body=body) | t.Repeat(body=body) | t.Timed(body=body):
                    found |= names(body)
                case t.Policy(choices=choices):
                    found |= {name for choice in choices for name in names(choice.body)}
                case t.If(then=then, otherwise=otherwise):
                    found |= names(then) | names(otherwise)
        return found

    return {name for block in blocks for name in {block.variable} | names(block.body)}
