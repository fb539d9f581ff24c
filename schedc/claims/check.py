"""Decides the claims of a schedule's authors: for all costs exactly, or by trials where that is impossible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from schedc.claims.trials import COSTLY, COUNTS, Trials, rank_variables, scalars
from schedc.diagnostics import Diagnostic, Label
from schedc.elaborate.frozen import follows_costs
from schedc.exact.cone import Vector
from schedc.exact.examples import near_vectors, small_vectors
from schedc.exact.space import Space
from schedc.exact.verdict import Facts, Verdict, decide_claim
from schedc.ir.schedule import Schedule
from schedc.step.claim_values import NoValue, mentioned
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import COST_SYMBOLS, ZERO_SYMBOLS
from schedc.step.dependencies import Dependencies
from schedc.step.memory import Memory
from schedc.syntax import tree
from schedc.syntax.input import Input, Order
from schedc.units import equations

if TYPE_CHECKING:
    from schedc.step.placed_works import TimedWorks

Status = Literal["proved", "refuted", "vacuous", "order", "tried"]

STATUSES: tuple[Status, ...] = get_args(Status)

VECTORS = 32
"""Cost vectors that satisfy a claim's condition at which a claim is tried that cannot be decided."""


@dataclass(frozen=True)
class Counterexample:
    """Costs at which a claim fails, the rank if the claim is about one, and the values of both sides."""

    costs: dict[str, float]
    rank: int | None
    left: float | None
    comparison: str
    right: float | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ClaimResult:
    """The decision about an ``expect`` at a size.

    status:
        ``proved``: the claim holds for all costs of ``domain`` that satisfy its condition.
        ``refuted``: it fails at ``counterexample``.
        ``vacuous``: no costs of ``domain`` satisfy its condition.
        ``order``: proved for the order that a `policy` chose at the given costs; others may choose others.
        ``tried``: it cannot be decided, for the reason in ``why``; it held at ``tested`` cost vectors.
    domain: the costs that the claim covers, as comparisons; empty where no cost matters to it.
    simulations: number of cost vectors simulated to decide it.
    applies: whether the claim covers the given costs. aside: the reason if not.
    """

    claim: str
    condition: str
    status: Status
    why: str = ""
    domain: tuple[str, ...] = ()
    simulations: int = 0
    tested: int = 0
    applies: bool = False
    aside: str = ""
    counterexample: Counterexample | None = None
    diagnostic: Diagnostic | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds, as far as it was decided or tried; None where there was nothing to try."""
        if self.status == "vacuous" or (self.status == "tried" and not self.tested):
            return None
        return self.status != "refuted"

    def to_json(self) -> dict[str, Any]:
        plain = ("claim", "condition", "status", "why", "domain", "simulations", "tested", "holds", "applies", "aside")
        example = self.counterexample.to_json() if self.counterexample else None
        return {name: getattr(self, name) for name in plain} | {"domain": list(self.domain), "counterexample": example}


def check_claims(
    claims: Sequence[tree.Claim],
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    dependencies: Dependencies | None = None,
    memory: Memory | None = None,
    follows_costs: bool = False,
) -> list[ClaimResult]:
    """Decide every claim on a legal schedule for all costs, and at the given costs if it covers them.

    The symbols F, I, W, B, R, FB and p2p are what each stage costs, the same for all. Each is greater than 0 but p2p,
    which is at least 0. FB is between max(F, B) and F + B, and B = I + W where the order has an I. A claim that does
    not name p2p covers p2p = 0 only; so it is with a key that every op takes. A claim that does not compare sums of
    times and costs is tried at up to `VECTORS` cost vectors.

    memory: the peaks of the schedule, if they are measured already.
    follows_costs: whether other costs would have chosen another order (`policy`).

    The metrics are those of `Timeline` and `Memory`, and ``ops``. Without an index a metric is the largest over the
    ranks; with a name that nothing else has, ``bubble[r]``, the claim is about every rank.
    """
    dependencies = dependencies or Dependencies.of(schedule)
    trials = Trials(schedule, dependencies, costs or Costs(), memory)
    counted = COUNTS & {name for claim in claims for name in _names(claim)}
    facts = Facts(dependencies, {name: trials.counts[name].tolist() for name in sorted(counted)})
    return [_check(claim, trials, facts, follows_costs) for claim in claims]


def verdicts(
    given: Input,
    sizes: Mapping[str, int],
    costs: Costs,
    dependencies: Dependencies,
    written: Dependencies | None,
    memory: Memory,
    works: TimedWorks | None,
) -> tuple[ClaimResult, ...]:
    """The verdicts on the claims of a schedule or a plan, about the order that its authors wrote.

    written: the order without what the compiler placed, if it placed anything. memory: of the step with its works.
    """
    known = memory if written is None and works is None else None
    written = written or dependencies
    policy = not isinstance(given, Order) and follows_costs(given, sizes)
    results = check_claims(
        given.claims, written.schedule, costs, dependencies=written, memory=known, follows_costs=policy
    )
    return tuple(results)


def _names(claim: tree.Claim) -> frozenset[str]:
    return frozenset({*mentioned(claim.claim), *mentioned(claim.condition)})


def _check(claim: tree.Claim, trials: Trials, facts: Facts, follows_costs: bool) -> ClaimResult:
    names = _names(claim)
    costs = frozenset(names & set(COST_SYMBOLS))
    try:
        verdict = decide_claim(claim, facts, costs, rank_variables(claim))
        user = _at_user_costs(claim, trials, names, verdict)
        result = _decided(claim, verdict, trials, user) if verdict.status != "open" else _tried(claim, verdict, trials)
    except NoValue as error:
        message = f"`{claim.text}` has no value at {equations(trials.schedule.sizes)}"
        wrong = Diagnostic("S502", message, Label(error.node.span, str(error)), source=trials.schedule.source)
        return ClaimResult(claim.text, claim.condition_text, "tried", str(error), diagnostic=wrong)
    domain = verdict.space.texts if names & COSTLY else ()
    result = replace(result, applies=user.applies, aside=user.aside, domain=domain)
    return _of_one_order(result, user) if follows_costs else result


def _of_one_order(result: ClaimResult, user: _AtUserCosts) -> ClaimResult:
    """The result for a `policy`, whose order other costs may change: it fails at the given costs or not."""
    why = "a policy: other costs may choose another order"
    if result.status == "proved":
        return replace(result, status="order", why=why)
    if result.status == "refuted" and user.fails is None:
        tried = replace(result, status="tried", why=why, tested=int(user.applies))
        return replace(tried, diagnostic=None, counterexample=None)
    if result.status == "refuted" and result.diagnostic:
        note = "the order is the one that the policy chose at the given costs"
        return replace(result, why=why, diagnostic=replace(result.diagnostic, notes=(*result.diagnostic.notes, note)))
    return result


@dataclass(frozen=True)
class _AtUserCosts:
    """The given costs. applies: whether a claim covers them. aside: why not. fails: costs and rank of a failure."""

    applies: bool
    aside: str = ""
    fails: tuple[Costs, int] | None = None


def _at_user_costs(claim: tree.Claim, trials: Trials, names: frozenset[str], verdict: Verdict) -> _AtUserCosts:
    vector = scalars(trials.costs)
    if aside := trials.why_not_given(names):
        return _AtUserCosts(False, aside)
    # A proved claim can fail only at costs of 0, which its domain excludes.
    within = all(getattr(vector, symbol) > 0 for symbol in verdict.space.symbols if symbol not in ZERO_SYMBOLS)
    if (verdict.status == "vacuous" and within) or not trials.satisfying(claim, (vector,)):
        return _AtUserCosts(False, "the condition does not hold at these costs")
    proved = verdict.status == "proved" and within
    return _AtUserCosts(True, fails=None if proved else trials.failing(claim, (vector,)))


# Decided claims, and tried claims.


def _decided(claim: tree.Claim, verdict: Verdict, trials: Trials, user: _AtUserCosts) -> ClaimResult:
    result = ClaimResult(claim.text, claim.condition_text, "proved", simulations=verdict.simulations)
    # A claim that is not refuted fails at the user's costs if some are 0, which no domain contains.
    if failed := _example(claim, verdict, trials, user) if verdict.status == "refuted" else user.fails:
        return _refuted(result, claim, trials, failed, verdict.space)
    if verdict.status == "vacuous":
        sizes = not mentioned(claim.condition) & COSTLY
        why = "the condition does not hold at this size" if sizes else "no costs satisfy the condition at this size"
        return replace(result, status="vacuous", why=why)
    return result


def _tried(claim: tree.Claim, verdict: Verdict, trials: Trials) -> ClaimResult:
    names = _names(claim)
    own = () if trials.why_not_given(names) else (scalars(trials.costs),)
    every = tuple(dict.fromkeys((*own, *trials.battery(names))))
    vectors = tuple(islice(trials.satisfying(claim, every), VECTORS))
    result = ClaimResult(claim.text, claim.condition_text, "tried", verdict.why, tested=len(vectors))
    failed = trials.failing(claim, vectors) if vectors else None
    return _refuted(result, claim, trials, failed, verdict.space) if failed else result


def _example(claim: tree.Claim, verdict: Verdict, trials: Trials, user: _AtUserCosts) -> tuple[Costs, int]:
    """Costs at which a refuted claim fails, in small whole numbers if possible, and the first rank where it fails."""
    assert verdict.refuted is not None
    space = verdict.space
    if user.fails and all(float(getattr(user.fails[0], s)).is_integer() for s in space.symbols):
        return user.fails
    if small := _first_failing(claim, small_vectors(space, *verdict.likely), space, trials) or user.fails:
        return small
    near = _first_failing(claim, near_vectors(space, verdict.refuted), space, trials)
    return near or (_costs(space, verdict.refuted.vector), 0)


def _first_failing(
    claim: tree.Claim, batches: Iterable[list[Vector]], space: Space, trials: Trials
) -> tuple[Costs, int] | None:
    for vectors in batches if _names(claim) & COSTLY else [[space.cone.interior]]:
        costs = tuple(_costs(space, vector) for vector in vectors)
        if costs and (failed := trials.failing(claim, costs)):
            return failed
    return None


def _costs(space: Space, vector: Vector) -> Costs:
    """The costs of a vector, with defaults for those that are not free."""
    values: dict[str, Any] = {symbol: float(cost) for symbol, cost in space.costs(vector).items()}
    return scalars(Costs(**values))


# Counterexamples and their diagnostics.


def _refuted(
    result: ClaimResult, claim: tree.Claim, trials: Trials, failed: tuple[Costs, int], space: Space
) -> ClaimResult:
    """The result with costs and rank at which the claim fails. Shown are the free costs, and costs in the claim."""
    costs, rank = failed
    names = _names(claim)
    shown = {*space.symbols, *names} if names & COSTLY else set()
    values = {s: _number(getattr(costs, s)) for s in COST_SYMBOLS if s in shown}
    sides = trials.sides(claim, costs, rank) or (None, "", None)
    example = Counterexample(values, rank if rank_variables(claim) else None, *sides)
    diagnostic = _diagnostic(claim, trials.schedule, example)
    return replace(result, status="refuted", why="", counterexample=example, diagnostic=diagnostic)


def _diagnostic(claim: tree.Claim, schedule: Schedule, example: Counterexample) -> Diagnostic:
    on_rank = f"on rank {example.rank}, " if example.rank is not None else ""
    label = f"{on_rank}left {example.left:.10g}, right {example.right:.10g}" if example.comparison else on_rank
    costs = ", ".join(f"{symbol} = {value:.10g}" for symbol, value in example.costs.items())
    place = f"at {equations(schedule.sizes)}"
    return Diagnostic(
        "S501",
        f"the claim `{claim.text}` does not hold",
        Label(claim.span, label.rstrip(", ")),
        notes=(f"counterexample: {costs} {place}" if costs else f"counterexample: {place}",),
        help="correct the claim, or say with `when` at which sizes and costs it holds",
        source=schedule.source,
    )


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value
