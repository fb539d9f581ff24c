"""The time of a cell: the longest of sums of cost keys, as data, and its value under costs of any type.

A cell is an op, or an overlapped pair of two. FB is the time of a pair with a full backward, less its W where the
backward is an I. Such a pair is never shorter than either of its ops. A pair with a W takes as long as both ops.

    F                {F}
    F & W            {F + W}
    F & B            {FB}               {F + B} where no FB is given
    F & I            {FB - W, F, I}     {F + I} where no FB is given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.ops import FACTS, OpKind
from schedc.step.costs.costs import OpCosts
from schedc.step.costs.keys import EVERY_OP


class Term(NamedTuple):
    """A key of a sum. op: 0 or 1, the op of the cell at whose stage it counts. sign: 1 or -1."""

    key: str
    op: int = 0
    sign: int = 1


Sum = tuple[Term, ...]


@cache
def sums(first: OpKind, second: OpKind | None = None, *, joint: bool = False) -> tuple[Sum, ...]:
    """The sums whose longest is the time of a cell. joint: whether costs give an FB."""
    if joint and (second is None or not FACTS[second].backward):
        return sums(first, second)
    longest: tuple[Sum, ...]
    own = Term(first.name)
    if second is None:
        longest = ((own,),)
    elif not joint:
        longest = ((own, Term(second.name, 1)),)
    elif FACTS[second].weight:
        longest = ((Term("FB"),),)
    else:
        longest = ((Term("FB"), Term("W", 1, -1)), (own,), (Term(second.name, 1),))
    more = tuple(Term(key, op) for op in range(1 if second is None else 2) for key in EVERY_OP)
    return tuple((*terms, *more) for terms in longest)


def totals(longest: Sequence[Sum], value: Callable[[str, int], Any]) -> list[Any]:
    """[sums] the value of each sum. value: gives a key at the stage of an op of the cell, of any type with + and -."""

    def total(terms: Sum) -> Any:
        whole = value(terms[0].key, terms[0].op)
        for key, op, sign in terms[1:]:
            whole = whole + value(key, op) if sign > 0 else whole - value(key, op)
        return whole

    return [total(terms) for terms in longest]


def duration(costs: OpCosts, first: OpKind, second: OpKind | None, rows: Sequence[Any]) -> Floats:
    """[n] or [n, K] times of n cells of the same kinds.

    rows: for each of the two ops [n] its stage; rows of the costs where these have one row for all stages.
    """

    def longest(joint: bool) -> Any:
        return reduce(np.maximum, totals(sums(first, second, joint=joint), value))

    def value(key: str, op: int) -> Any:
        return getattr(costs, key)[rows[op]]

    if costs.FB is None or sums(first, second) is sums(first, second, joint=True):
        return np.asarray(longest(False))
    apart = np.isnan(value("FB", 0))  # of a batch: the vectors without an FB
    return np.asarray(np.where(apart, longest(False), longest(True)) if apart.any() else longest(True))


def alone(costs: OpCosts) -> Floats:
    """[kinds, stages] or [kinds, rows, K] times of single ops."""
    return np.stack([totals(sums(kind), lambda key, _: getattr(costs, key))[0] for kind in OpKind])
