"""Tries claims at cost vectors, many at once: the values of their symbols there, and whether the claims hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schedc.ir.ops import OpKind
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.step.batch import Outcomes, simulate_batch
from schedc.step.claim_values import COMPARISONS, Environment, evaluate, expressions_in, mentioned
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import BY_NAME, COST_SYMBOLS, ZERO_SYMBOLS
from schedc.step.dependencies import Dependencies
from schedc.step.memory import Memory, measure_memory
from schedc.syntax import tree
from schedc.syntax.words import METRICS

TIMES = frozenset({"makespan", "bubble", "span_bubble"})
RATIOS = frozenset({"bubble_ratio", "span_bubble_ratio"})
COUNTS = frozenset(METRICS) - TIMES - RATIOS
COSTLY = TIMES | RATIOS | set(COST_SYMBOLS)
"""The names that make a claim depend on costs."""

Vectors = tuple[Costs, ...]


@dataclass(frozen=True)
class Trials:
    """A legal schedule on which claims are tried. costs: the user's. measured: its memory, if measured."""

    schedule: Schedule
    dependencies: Dependencies
    costs: Costs
    measured: Memory | None = None

    @cached_property
    def counts(self) -> dict[str, Any]:
        """[P] the metrics that no cost changes, by name."""
        memory = self.measured or measure_memory(self.schedule, None, self.dependencies)
        peaks = {name: getattr(memory, name) for name in COUNTS - {"ops"}}
        return {**peaks, "ops": np.diff(self.schedule.rank_start)}

    @cached_property
    def split(self) -> bool:
        """Whether the order has an I. B is then I + W."""
        return bool((self.schedule.kind == OpKind.I).any())

    @cached_property
    def recomputes(self) -> bool:
        return has_recomputation(self.schedule)

    @cached_property
    def simulated(self) -> dict[Vectors, Outcomes]:
        """Outcomes by cost vectors, shared by all claims."""
        return {}

    def outcomes(self, vectors: Vectors) -> Outcomes:
        if vectors not in self.simulated:
            self.simulated[vectors] = simulate_batch(self.dependencies, vectors)
        return self.simulated[vectors]

    # One claim.

    def truth(self, claim: tree.Claim, vectors: Vectors) -> Any:
        """[K, P] whether the claim holds, whether or not its condition is satisfied. Raises `NoValue`."""
        return self._lanes(evaluate(claim.claim, self.environment(claim, vectors)), len(vectors))

    def satisfying(self, claim: tree.Claim, vectors: Vectors) -> Vectors:
        """The vectors at which the claim's condition holds; on every rank, if it is about ranks."""
        if claim.condition is None:
            return vectors
        value = evaluate(claim.condition, self.environment(claim, vectors))
        holds = self._lanes(value, len(vectors)).all(axis=1).tolist()
        return tuple(vector for vector, keep in zip(vectors, holds, strict=True) if keep)

    def failing(self, claim: tree.Claim, vectors: Vectors) -> tuple[Costs, int] | None:
        """(costs, rank): the first vector that satisfies the condition and refutes the claim, and the rank."""
        fit = self.satisfying(claim, vectors)
        failed = np.argwhere(~self.truth(claim, fit)) if fit else np.zeros((0, 2), int)
        return (fit[int(failed[0, 0])], int(failed[0, 1])) if failed.size else None

    def sides(self, claim: tree.Claim, costs: Costs, rank: int) -> tuple[float, str, float] | None:
        """(left, comparison, right) of the part of the claim that fails; None if that part is no comparison."""
        environment = self.environment(claim, (costs,))

        def pick(value: Any) -> float:
            array = np.asarray(value)
            while array.ndim < 2:
                array = array[None]
            return float(array[0, min(rank, array.shape[1] - 1)])

        failing = _failing(claim.claim, lambda node: bool(pick(evaluate(node, environment))))
        if not (isinstance(failing, tree.Binary) and failing.op in COMPARISONS):
            return None
        left, right = (pick(evaluate(side, environment)) for side in (failing.left, failing.right))
        return left, failing.op, right

    def _lanes(self, value: Any, vectors: int) -> Any:
        """[K, P] truth of a value."""
        return np.broadcast_to(np.asarray(value).astype(bool), (vectors, self.schedule.ranks))

    def environment(self, claim: tree.Claim, vectors: Vectors) -> Environment:
        names: dict[str, Any] = {s: np.array([[_symbol(v, s)] for v in vectors]) for s in COST_SYMBOLS}
        names.update(self.schedule.sizes)

        def metric(name: str) -> Any:
            if name in COUNTS:
                return self.counts[name][None, :]
            value = getattr(self.outcomes(vectors), name)
            return value.T if value.ndim == 2 else np.broadcast_to(value[:, None], (len(vectors), self.schedule.ranks))

        def magnitude(node: tree.Expr) -> Any:
            return self.outcomes(vectors).makespan[:, None] if TIMES.intersection(mentioned(node)) else 0.0

        for name in rank_variables(claim):
            names[name] = np.arange(self.schedule.ranks)[None, :]
        return Environment(names, metric, magnitude)

    # The costs of the user.

    def why_not_given(self, names: frozenset[str]) -> str:
        """Why a claim does not cover the given costs; empty if it does."""
        if not names & COSTLY:
            return ""
        if not self.costs.uniform:
            return "the given costs differ between stages"
        if self.costs.microbatches:
            return "it speaks of microbatches of equal cost"
        for symbol in sorted(ZERO_SYMBOLS - names):
            if _symbol(scalars(self.costs), symbol):
                return f"it speaks of {symbol} = 0"
        F, I, W, B, FB = (_symbol(scalars(self.costs), s) for s in ("F", "I", "W", "B", "FB"))  # noqa: E741
        if self.split and abs(B - (I + W)) > 1e-9 * B:
            return "it speaks of B = I + W"
        if not max(F, B) * (1 - 1e-9) <= FB <= (F + B) * (1 + 1e-9):
            return "it speaks of an FB between max(F, B) and F + B"
        return ""

    def battery(self, names: frozenset[str]) -> Iterator[Costs]:
        """Integer cost vectors at which a claim with these names is tried if it cannot be decided.

        FB varies from max(F, B) to F + B where the claim names FB or the schedule pairs forwards with backwards. R
        varies from 0 to 3/2 F where the claim names R or the schedule has Rs. p2p and what every op
        takes vary where the claim names them.
        """
        overlaps = "FB" in names or bool(self.dependencies.with_backward.any())
        recomputes = "R" in names or self.recomputes
        for turn in range(3) if overlaps else (0,):
            for number, (F, I, W) in enumerate(_TRIPLES):  # noqa: E741
                B = I + W
                # how far FB is from F + B down to max(F, B), in halves
                share = (0, 2, 1)[(number + turn) % 3] if overlaps else 0
                FB = float(F + B - min(F, B) * share // 2)
                more: dict[str, Any] = dict.fromkeys(ZERO_SYMBOLS & names, float(number % 4))
                R = float(F * ((number + turn) % 4) // 2) if recomputes else float(F)
                yield Costs(float(F), float(I), float(W), float(B), FB, R=R, **more)


# (F, I, W), chosen so that every order and equality among F, I, W, B occurs, with W from small to large.
_TRIPLES = (
    (1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 2), (1, 1, 2), (3, 3, 2), (3, 3, 3), (5, 2, 3), (4, 7, 3), (2, 1, 1),
    (5, 5, 2), (7, 7, 4), (7, 8, 2), (3, 4, 4), (9, 8, 8), (5, 4, 4), (4, 4, 1), (5, 3, 2), (2, 2, 3), (1, 2, 3),
    (7, 3, 2), (12, 1, 1), (1, 12, 1), (1, 1, 12), (40, 41, 7), (8, 9, 8), (6, 6, 6), (10, 9, 3), (11, 11, 5),
    (4, 2, 2), (16, 16, 9), (13, 12, 12),
)  # fmt: skip


def scalars(costs: Costs) -> Costs:
    """Uniform costs with one number for all stages, and the defaults of B, R and FB filled in."""
    if not costs.uniform:
        return scalars(Costs())  # for claims that no cost matters to
    values: dict[str, Any] = {}
    for symbol in COST_SYMBOLS:  # a key comes behind the keys of its default sum
        value = getattr(costs, symbol)
        value = value[0] if isinstance(value, tuple) else value
        values[symbol] = BY_NAME[symbol].summed(values) if value is None else value
    return Costs(**values)


def _symbol(costs: Costs, name: str) -> float:
    return float(getattr(costs, name))


def rank_variables(claim: tree.Claim) -> frozenset[str]:
    """The names that index a metric: each means any rank."""
    return frozenset(
        node.index.id
        for node in expressions_in(claim.claim)
        if isinstance(node, tree.Index) and isinstance(node.index, tree.Name)
    )


def _failing(node: tree.Expr, holds: Any) -> tree.Expr:
    """The part of a conjunction that fails first."""
    if isinstance(node, tree.Binary) and node.op == "and":
        return _failing(node.right if holds(node.left) else node.left, holds)
    return node
