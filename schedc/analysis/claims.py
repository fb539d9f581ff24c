"""Checks what a schedule's authors claim about it, symbolically in the costs: on many cost vectors, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from schedc.analysis.batch import Outcomes, simulate_batch
from schedc.analysis.claim_values import COMPARISONS, Environment, NoValue, evaluate, mentioned, walk
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import measure_memory
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.syntax import tree
from schedc.syntax.words import COST_SYMBOLS, METRICS

TIMES = frozenset({"makespan", "bubble", "span_bubble"})
RATIOS = frozenset({"bubble_ratio", "span_bubble_ratio"})
COUNTS = frozenset(METRICS) - TIMES - RATIOS
COSTLY = TIMES | RATIOS | set(COST_SYMBOLS)
"""The names that make a claim depend on costs."""

VECTORS = 32
"""Cost vectors that a claim is tried at, of those that satisfy its condition."""


@dataclass(frozen=True)
class Counterexample:
    """Where a claim fails: the values of the symbols, the rank if the claim is about one, both sides."""

    costs: dict[str, float]
    rank: int | None
    left: float | None
    right: float | None
    comparison: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"costs": self.costs, "rank": self.rank, "left": self.left, "right": self.right}


@dataclass(frozen=True)
class ClaimResult:
    """What became of one ``expect``.

    holds: whether it holds wherever it was tried; None where it was not.
    tested: number of cost vectors tried; applies: whether the given costs are among them; why: if not, why not.
    """

    claim: str
    condition: str
    holds: bool | None
    tested: int
    applies: bool
    why: str = ""
    counterexample: Counterexample | None = None
    diagnostic: Diagnostic | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "condition": self.condition,
            "holds": self.holds,
            "tested": self.tested,
            "applies": self.applies,
            "why": self.why,
            "counterexample": self.counterexample.to_json() if self.counterexample else None,
        }


def check_claims(
    claims: Sequence[tree.Claim],
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    dependencies: Dependencies | None = None,
) -> list[ClaimResult]:
    """Try every claim on a legal schedule: at the given costs, if it speaks of them, and at a fixed battery.

    The symbols F, I, W, B, R, FB and p2p are what each stage costs, the same for all. The battery has small
    integer costs with B = I + W, for which timelines are exact; those that satisfy the claim's condition are tried,
    up to `VECTORS`. It varies FB from max(F, B) to F + B where the claim names it or the schedule has pairs, R from
    0 to 3/2 F where the claim names it or the schedule has Rs, and p2p where the claim names it; a claim that does
    not speaks of p2p = 0.

    The metrics are those of `Timeline` and `Memory`, and ``ops``. Without an index a metric is the largest over the
    ranks; with a name that nothing else has, ``bubble[r]``, the claim is about every rank.
    """
    known = dependencies or Dependencies.of(schedule)
    context = _Context(schedule, known, costs or Costs())
    return [_check(claim, context) for claim in claims]


@dataclass(frozen=True)
class _Context:
    schedule: Schedule
    dependencies: Dependencies
    given: Costs

    @cached_property
    def counts(self) -> dict[str, Any]:
        """The metrics that no cost changes, [1, P]."""
        memory = measure_memory(self.schedule, None, self.dependencies)
        found = {name: getattr(memory, name) for name in COUNTS - {"ops"}}
        return {name: row[None, :] for name, row in {**found, "ops": np.diff(self.schedule.rank_start)}.items()}

    @cached_property
    def recomputes(self) -> bool:
        return has_recomputation(self.schedule)

    @cached_property
    def simulated(self) -> dict[tuple[Costs, ...], Outcomes]:
        """Outcomes that claims share, by the costs."""
        return {}

    def outcomes(self, vectors: tuple[Costs, ...]) -> Outcomes:
        if vectors not in self.simulated:
            self.simulated[vectors] = simulate_batch(self.dependencies, vectors)
        return self.simulated[vectors]


# One claim.


def _check(claim: tree.Claim, context: _Context) -> ClaimResult:
    try:
        return _tried(claim, context)
    except NoValue as error:
        message = f"`{claim.text}` has no value at {_sizes(context.schedule)}"
        source = context.schedule.source
        wrong = Diagnostic("S502", message, Label(error.node.span, str(error)), source=source)
        return ClaimResult(claim.text, claim.condition_text, None, 0, False, str(error), diagnostic=wrong)


def _tried(claim: tree.Claim, context: _Context) -> ClaimResult:
    names = {*mentioned(claim.claim), *mentioned(claim.condition)}
    why = _why_not_given(context, names)
    given: tuple[Costs, ...] = () if why else (_scalars(context.given),)
    vectors = _satisfying(claim, context, tuple(dict.fromkeys((*given, *_battery(names, context)))))
    applies = bool(given) and given[0] in vectors
    if given and not applies:
        why = "the condition does not hold at these costs"
    if not vectors:
        of_sizes = not mentioned(claim.condition) & COSTLY
        why = "its condition "
        why += "does not hold at these sizes" if of_sizes else "holds at these sizes for none of the costs tried"
        return ClaimResult(claim.text, claim.condition_text, None, 0, False, why)
    environment = _environment(claim, context, vectors)
    truth = _lanes(evaluate(claim.claim, environment), len(vectors), context.schedule.ranks)
    failed = np.argwhere(~truth)
    result = ClaimResult(claim.text, claim.condition_text, not failed.size, len(vectors), applies, why)
    if not failed.size:
        return result
    at, rank = (int(index) for index in failed[0])
    shown = names | {"F", "I", "W", *(["R"] if context.recomputes else [])}
    example = _counterexample(claim, environment, vectors, shown, at, rank)
    refuted = int((~truth).any(axis=1).sum())
    diagnostic = _diagnostic(claim, context, example, refuted, len(vectors))
    return replace(result, counterexample=example, diagnostic=diagnostic)


def _satisfying(claim: tree.Claim, context: _Context, vectors: tuple[Costs, ...]) -> tuple[Costs, ...]:
    """The first of the vectors at which the claim's condition holds (for every rank, if it speaks of ranks)."""
    if claim.condition is None:
        return vectors[:VECTORS]
    value = evaluate(claim.condition, _environment(claim, context, vectors))
    holds = _lanes(value, len(vectors), context.schedule.ranks).all(axis=1)
    return tuple(islice((v for v, keep in zip(vectors, holds.tolist(), strict=True) if keep), VECTORS))


def _lanes(value: Any, vectors: int, ranks: int) -> Any:
    """[K, P] truth of a value."""
    return np.broadcast_to(np.asarray(value).astype(bool), (vectors, ranks))


def _why_not_given(context: _Context, names: set[str]) -> str:
    """Why the symbols of a claim do not describe the given costs; empty if they do."""
    given, split = context.given, bool((context.schedule.kind == OpKind.I).any())
    if not names & COSTLY:
        return ""
    if not given.uniform:
        return "the given costs differ between stages"
    if given.p2p and "p2p" not in names:
        return "it speaks of p2p = 0"
    F, I, W, B, FB = (_symbol(_scalars(given), s) for s in ("F", "I", "W", "B", "FB"))  # noqa: E741
    if split and abs(B - (I + W)) > 1e-9 * B:
        return "it speaks of B = I + W"
    if not max(F, B) * (1 - 1e-9) <= FB <= (F + B) * (1 + 1e-9):
        return "it speaks of an FB between max(F, B) and F + B"
    return ""


# Cost vectors.

# (F, I, W), chosen so that every order and equality among F, I, W, B occurs, with W from small to large.
_TRIPLES = (
    (1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 2), (1, 1, 2), (3, 3, 2), (3, 3, 3), (5, 2, 3), (4, 7, 3), (2, 1, 1),
    (5, 5, 2), (7, 7, 4), (7, 8, 2), (3, 4, 4), (9, 8, 8), (5, 4, 4), (4, 4, 1), (5, 3, 2), (2, 2, 3), (1, 2, 3),
    (7, 3, 2), (12, 1, 1), (1, 12, 1), (1, 1, 12), (40, 41, 7), (8, 9, 8), (6, 6, 6), (10, 9, 3), (11, 11, 5),
    (4, 2, 2), (16, 16, 9), (13, 12, 12),
)  # fmt: skip


def _battery(names: set[str], context: _Context) -> Iterator[Costs]:
    """The integer cost vectors for a claim with those names; one where no cost matters to it."""
    if not names & COSTLY:
        return
    overlaps = "FB" in names or bool(context.dependencies.pairs.any())
    recomputes = "R" in names or context.recomputes
    for turn in range(3) if overlaps else (0,):
        for number, (F, I, W) in enumerate(_TRIPLES):  # noqa: E741
            B = I + W
            # how far FB is from F + B down to max(F, B), in halves
            share = (0, 2, 1)[(number + turn) % 3] if overlaps else 0
            FB = float(F + B - min(F, B) * share // 2)
            p2p = float(number % 4) if "p2p" in names else 0.0
            R = float(F * ((number + turn) % 4) // 2) if recomputes else float(F)
            yield Costs(float(F), float(I), float(W), float(B), FB, p2p, R=R)


def _scalars(costs: Costs) -> Costs:
    """Uniform costs with one number for all stages, and the defaults of B, R and FB filled in."""
    if not costs.uniform:
        return _scalars(Costs())  # for claims that no cost matters to
    values = {s: value[0] if isinstance(value := getattr(costs, s), tuple) else value for s in COST_SYMBOLS}
    values["B"] = values["I"] + values["W"] if values["B"] is None else values["B"]
    values["R"] = values["F"] if values["R"] is None else values["R"]
    values["FB"] = values["F"] + values["B"] if values["FB"] is None else values["FB"]
    return Costs(**values)


def _symbol(costs: Costs, name: str) -> float:
    return float(getattr(costs, name))


# Values of names.


def _environment(claim: tree.Claim, context: _Context, vectors: tuple[Costs, ...]) -> Environment:
    schedule = context.schedule
    names: dict[str, Any] = {s: np.array([[_symbol(v, s)] for v in vectors]) for s in COST_SYMBOLS}
    names.update(schedule.sizes)

    def metric(name: str) -> Any:
        if name in COUNTS:
            return context.counts[name]
        value = getattr(context.outcomes(vectors), name)
        return value.T if value.ndim == 2 else np.broadcast_to(value[:, None], (len(vectors), schedule.ranks))

    def magnitude(node: tree.Expr) -> Any:
        return context.outcomes(vectors).makespan[:, None] if TIMES.intersection(mentioned(node)) else 0.0

    for name in _rank_variables(claim):
        names[name] = np.arange(schedule.ranks)[None, :]
    return Environment(names, metric, magnitude)


def _rank_variables(claim: tree.Claim) -> set[str]:
    """The names that index a metric: each stands for any rank."""
    return {
        node.index.id
        for node in walk(claim.claim)
        if isinstance(node, tree.Index) and isinstance(node.index, tree.Name)
    }


# What is said of a failure.


def _counterexample(
    claim: tree.Claim, environment: Environment, vectors: tuple[Costs, ...], shown: set[str], at: int, rank: int
) -> Counterexample:
    costs = {s: _symbol(vectors[at], s) for s in COST_SYMBOLS if s in shown}
    about_ranks = bool(_rank_variables(claim))

    def pick(value: Any) -> float:
        array = np.asarray(value)
        while array.ndim < 2:
            array = array[None]
        return float(array[min(at, array.shape[0] - 1), min(rank, array.shape[1] - 1)])

    failing = _failing(claim.claim, lambda node: bool(pick(evaluate(node, environment))))
    if not (isinstance(failing, tree.Binary) and failing.op in COMPARISONS):
        return Counterexample(costs, rank if about_ranks else None, None, None)
    left, right = (pick(evaluate(side, environment)) for side in (failing.left, failing.right))
    return Counterexample(costs, rank if about_ranks else None, left, right, failing.op)


def _failing(node: tree.Expr, holds: Any) -> tree.Expr:
    """The part of a conjunction that fails first."""
    if isinstance(node, tree.Binary) and node.op == "and":
        return _failing(node.right if holds(node.left) else node.left, holds)
    return node


def _diagnostic(claim: tree.Claim, context: _Context, example: Counterexample, refuted: int, tested: int) -> Diagnostic:
    on_rank = f"on rank {example.rank}, " if example.rank is not None else ""
    label = f"{on_rank}left {_plain(example.left)}, right {_plain(example.right)}" if example.comparison else on_rank
    costs = ", ".join(f"{symbol} = {_plain(value)}" for symbol, value in example.costs.items())
    return Diagnostic(
        "S501",
        f"the claim `{claim.text}` does not hold",
        Label(claim.span, label.rstrip(", ")),
        notes=(
            f"counterexample: {costs} at {_sizes(context.schedule)}",
            f"it fails at {refuted} of the {tested} cost vectors tried"
            + (f" that satisfy `{claim.condition_text}`" if claim.condition else ""),
        ),
        help="correct the claim, or say with `when` at which costs it holds",
        source=context.schedule.source,
    )


def _sizes(schedule: Schedule) -> str:
    return ", ".join(f"{name} = {value}" for name, value in schedule.sizes.items())


def _plain(value: float | None) -> str:
    return f"{value:.10g}"
