"""Finds coefficients under which every op of an order comes behind the one before it: one linear program."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

import numpy as np

from schedc.ir.arrays import Floats

NO_SOLVER = "slots are fitted by a linear program, which needs OR-tools: pip install 'schedc[tune]'"
_SMALL = 1e-4
"""Weight of the size of coefficients beside violated rows."""
_DENOMINATOR = 8
"""The largest denominator of a coefficient."""


@dataclass(frozen=True)
class LinearFit:
    """coefficients: [columns] exact. violated: number of rows that the program could not satisfy."""

    coefficients: tuple[Fraction, ...]
    violated: int


def solver_is_there() -> bool:
    """Whether the extra `tune` is installed."""
    return find_spec("ortools") is not None


def least_coefficients(rows: Floats, margin: Floats, *, strict: bool) -> LinearFit | None:
    """Finds the smallest coefficients x with ``rows @ x >= margin``. None: no x does.

    rows: [rows, columns]. margin: [rows]. strict: whether every row must hold. Otherwise the sum of what rows lack is
    minimized first.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity, columns = solver.infinity(), rows.shape[1]
    unknown = [solver.NumVar(-infinity, infinity, f"x{column}") for column in range(columns)]
    size = [solver.NumVar(0, infinity, f"size{column}") for column in range(columns)]
    lacks = [] if strict else [solver.NumVar(0, infinity, f"lack{row}") for row in range(len(rows))]
    for column, least in zip(unknown, size, strict=True):
        solver.Add(least >= column)
        solver.Add(least >= -column)
    for number, (row, least) in enumerate(zip(rows.tolist(), margin.tolist(), strict=True)):
        constraint = solver.Constraint(least, infinity)
        for factor, column in zip(row, unknown, strict=True):
            if factor:
                constraint.SetCoefficient(column, factor)
        if lacks:
            constraint.SetCoefficient(lacks[number], 1.0)
    solver.Minimize(sum(lacks) + sum(size) * (1.0 if strict else _SMALL))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    found = np.array([column.solution_value() for column in unknown])
    coefficients = tuple(Fraction(value).limit_denominator(_DENOMINATOR) for value in found.tolist())
    exact = np.array([float(value) for value in coefficients])
    violated = int((rows @ exact < margin - 1e-6).sum())
    return None if strict and violated else LinearFit(coefficients, violated)
