"""The sizes of a derivation: sizes for the fits of formulas, and larger sizes that only decide formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

from schedc.claims.sweep import REFUSED
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.sizes import meets_requirements, parameter_of_role
from schedc.ir.arrays import Int64
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.syntax.tree import ScheduleTree, SizeParameter

_AS_MANY = 12
"""How many fitted sizes have as many microbatches as ranks: many pieces meet there."""

FITTED, HELD_OUT = 84, 96
"""How many sizes are fitted, and how many are held out."""

_RANKS = range(2, 11)
_LARGER_RANKS = (*range(2, 17), 18, 20, 22)
_OTHERS = (1, 2, 3, 4)
_MOST_OPS = 20_000


@dataclass(frozen=True, eq=False)
class Size:
    """One legal size: its parameters by name, and the cells of the schedule at it."""

    values: Mapping[str, int]
    cells: Dependencies


@dataclass(frozen=True, eq=False)
class SizeGrid:
    """The sizes of one schedule; ``fitted`` and ``held_out`` share none.

    ranks, microbatches: names of those two parameters. others: names of the rest.
    illegal: findings at the first size at which the schedule is broken, rather than refused by a `require`.
    """

    ranks: str
    microbatches: str
    others: tuple[str, ...]
    fitted: tuple[Size, ...]
    held_out: tuple[Size, ...]
    illegal: tuple[Diagnostic, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ranks, self.microbatches, *self.others)


def columns(sizes: Iterable[Size], names: Iterable[str]) -> dict[str, Int64]:
    """[n] values of each parameter, one row per size."""
    listed = list(sizes)
    return {name: np.array([size.values[name] for size in listed], np.int64) for name in names}


def size_grid(tree: ScheduleTree, fit: int = FITTED, more: int = HELD_OUT) -> SizeGrid:
    """Up to ``fit`` fitted and ``more`` held-out legal sizes, chosen by a fixed shuffle of the candidates.

    Besides ``fit``, up to `_AS_MANY` sizes with as many microbatches as ranks are fitted.
    """
    ranks, microbatches = parameter_of_role(tree, "ranks"), parameter_of_role(tree, "microbatches")
    others = [p for p in tree.parameters if p not in (ranks, microbatches)]
    names = (ranks.name, microbatches.name, *(p.name for p in others))
    illegal: list[Diagnostic] = []

    def legal(most: int, some: Iterable[int], of_ranks: Callable[[int], Iterable[int]], seen: list[Size]) -> list[Size]:
        values = (
            dict(zip(names, (P, M, *more), strict=True))
            for P in some
            for M in of_ranks(P)
            for more in product(*(_values(parameter, P) for parameter in others))
        )
        return _legal(tree, values, most, {tuple(size.values.values()) for size in seen}, illegal)

    fitted = legal(_AS_MANY, _RANKS, lambda P: (P,), [])
    fitted += legal(fit, _RANKS, lambda P: range(1, 4 * P + 4), fitted)
    held_out = legal(more, _LARGER_RANKS, _more_microbatches, fitted) if fitted else []
    return SizeGrid(ranks.name, microbatches.name, names[2:], tuple(fitted), tuple(held_out), tuple(illegal))


def _more_microbatches(ranks: int) -> Iterable[int]:
    return sorted({*range(1, 4 * ranks), *(k * ranks + j for k in (4, 5, 6) for j in (-2, 0, 1, 3, 4))})


def _values(parameter: SizeParameter, ranks: int) -> list[int]:
    """Values to try for another parameter: small ones, its default, and multiples of the ranks for a count."""
    by_ranks = (ranks, ranks + 1, 2 * ranks) if parameter.role == "count" else ()
    return sorted({*_OTHERS, *by_ranks, *([parameter.default] if parameter.default else [])})


def _legal(
    tree: ScheduleTree,
    candidates: Iterable[dict[str, int]],
    most: int,
    seen: set[tuple[int, ...]],
    illegal: list[Diagnostic],
) -> list[Size]:
    shuffled = list(candidates)
    Random(len(shuffled)).shuffle(shuffled)
    sizes: list[Size] = []
    for values in shuffled:
        if len(sizes) == most:
            break
        try:
            if not meets_requirements(tree, values):
                continue
            schedule = elaborate(tree, values)
            if findings := check_schedule(schedule):
                raise DiagnosticError(findings)
        except DiagnosticError as error:
            if not illegal and not {d.code for d in error.diagnostics} <= REFUSED:
                illegal.extend(error.diagnostics)
            continue
        if tuple(schedule.sizes.values()) not in seen and len(schedule) <= _MOST_OPS:
            sizes.append(Size(schedule.sizes, Dependencies.of(schedule)))
    return sizes
