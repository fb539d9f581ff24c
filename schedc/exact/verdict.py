"""Decides a claim for all costs at one size: proved, refuted, vacuous, or open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from schedc.exact.cone import Cone, Vector, dot
from schedc.exact.decide import Refuted, TooMany, decide
from schedc.exact.read import ClaimReader, NotLinear
from schedc.exact.space import Space
from schedc.exact.statement import (
    Statement,
    closed,
    comparisons,
    conjunctions,
    contrary,
    joint,
    linearized,
    quantities,
    stripped,
    true_at,
)
from schedc.exact.times import LinearTimes, simulations_on, times_on
from schedc.ir.schedule import Schedule
from schedc.step.dependencies import Dependencies
from schedc.syntax import tree


@dataclass(frozen=True)
class CostRegion:
    """Costs that satisfy a conjunction. cone: their closure. positive: forms above 0 at all of these costs."""

    cone: Cone
    positive: tuple[Vector, ...]

    def holds_inside(self, cone: Cone) -> bool:
        """Whether the relative interior of a part of the closure consists of such costs."""
        if not cone.rays:
            return False
        point = cone.interior
        return all(dot(form, point) > 0 for form in self.positive)


@dataclass(frozen=True)
class Verdict:
    """The decision about a claim.

    status: ``proved``, ``refuted``, ``vacuous`` (no costs satisfy the condition) or ``open``.
    space: the costs that the claim covers. simulations: number of cost vectors simulated.
    why: for ``open``, the part that is not decidable. refuted: for ``refuted``, the vector at which the claim fails.
    likely: the condition and the claim as statements without times; the claim as it is around that vector.
    """

    status: Literal["proved", "refuted", "vacuous", "open"]
    space: Space
    simulations: int = 0
    why: str = ""
    refuted: Refuted | None = None
    likely: tuple[Statement, Statement] = (True, True)


@dataclass(frozen=True)
class Facts:
    """Facts of a schedule that its claims may use besides costs. counts: [P] by metric."""

    dependencies: Dependencies
    counts: Mapping[str, Sequence[int]]

    @property
    def schedule(self) -> Schedule:
        return self.dependencies.schedule


def decide_claim(claim: tree.Claim, facts: Facts, costs: frozenset[str], variables: frozenset[str]) -> Verdict:
    """Decide a claim for all costs.

    costs: the cost symbols that the claim names. variables: names in the claim for any rank. Raises `NoValue`.
    """
    space = replace(Space.of(facts.dependencies, costs), constant=True)
    try:
        condition, statement = _statements(claim, facts, space, variables)
    except NotLinear as error:
        return Verdict("open", replace(space, constant=False), why=f"not decidable: {error}")
    if not any(c.form[-1] for part in (condition, statement) for c in comparisons(part)):
        space = replace(space, constant=False)
        condition, statement = stripped(condition), stripped(statement)
    try:
        return _decided(condition, statement, facts, space)
    except TooMany:
        return Verdict("open", space, why="not decidable here: its times have too many linear pieces")


def _statements(
    claim: tree.Claim, facts: Facts, space: Space, variables: frozenset[str]
) -> tuple[Statement, Statement]:
    """(condition, claim), each for every rank that the variables may be."""
    works = [simulations.work for _, simulations in simulations_on(facts.dependencies, space, space.cone)]
    work = [forms[0] if len(set(forms)) == 1 else None for forms in zip(*works, strict=True)]

    def for_ranks(node: tree.Expr | None) -> Statement:
        if node is None:
            return True
        schedule = facts.schedule
        numbers = ({**schedule.sizes, **dict.fromkeys(variables, rank)} for rank in range(schedule.ranks))
        readers = (ClaimReader(space, each, facts.counts, work) for each in islice(numbers, None if variables else 1))
        return joint("and", tuple(reader.statement(node) for reader in readers))

    condition = for_ranks(claim.condition)
    # A claim may have no value where its condition is about sizes and false.
    return condition, True if condition is False else for_ranks(claim.claim)


def _decided(condition: Statement, statement: Statement, facts: Facts, space: Space) -> Verdict:
    simulated = 0
    if quantities(condition):
        met = _search(contrary(condition), True, facts, space)
        if met.refuted is None:
            return Verdict("vacuous", space, met.simulations)
        simulated = met.simulations
        statement, condition = joint("or", (contrary(condition), statement)), True
    elif next(regions_of(condition, space), None) is None:
        return Verdict("vacuous", space)
    verdict = _search(statement, condition, facts, space)
    return replace(verdict, simulations=verdict.simulations + simulated)


def _search(statement: Statement, condition: Statement, facts: Facts, space: Space) -> Verdict:
    """Whether the statement holds at all costs that satisfy the condition. The condition contains no time."""
    ranks = sorted({rank for name, rank in quantities(statement) if name in ("start", "end")})
    if any(name in ("span", "span_bubble") for name, _ in quantities(statement)):
        ranks = list(range(facts.schedule.ranks))
    simulated = 0
    for region in regions_of(condition, space):
        parts = times_on(facts.dependencies, space, region.cone, ranks)
        likely, refuted = None, None
        for part, times in parts:
            if refuted := refuted_in(statement, region, part, times):
                forms = {q: times.form(q, refuted.vector) for q in quantities(statement)}
                likely = (condition, linearized(statement, forms))
                break
        simulated += sum(len(s) for s in {id(t.simulations): t.simulations for _, t in parts}.values())
        if likely:
            return Verdict("refuted", space, simulated, refuted=refuted, likely=likely)
    return Verdict("proved", space, simulated)


def regions_of(condition: Statement, space: Space) -> Iterator[CostRegion]:
    """The costs of a space that satisfy a condition on costs, as regions that cover them."""
    for alternative in conjunctions(condition):
        cone = space.cone
        positive = [bound.form for bound in space.bounds if bound.strict]
        for comparison in alternative:
            sign = -1 if comparison.op in ("<", "<=") else 1
            form = tuple(sign * c for c in comparison.form)
            cone = cone.cut(form, equal=comparison.op == "==")
            positive += [form] * (comparison.op in ("<", ">"))
        region = CostRegion(cone, tuple(positive))
        if region.holds_inside(cone):
            yield region


def refuted_in(statement: Statement, region: CostRegion, part: Cone, times: LinearTimes) -> Refuted | None:
    """Costs of a region, inside a part of its closure, at which the statement fails; None if it holds there."""
    if not closed(statement):
        inside = (face for face in part.faces() if region.holds_inside(face))
        return next((refuted for refuted in (decide(statement, face, times) for face in inside) if refuted), None)
    refuted = decide(statement, part, times)
    if refuted is None or region.holds_inside(refuted.cone):
        return refuted
    return _pushed(statement, region, refuted, times)


def _pushed(statement: Statement, region: CostRegion, limit: Refuted, times: LinearTimes) -> Refuted:
    """Costs of a region at which a closed statement fails, near a limit of the region at which it fails."""
    inside, factor = region.cone.interior, 1
    while True:
        vector = tuple(factor * x + y for x, y in zip(limit.vector, inside, strict=True))
        values = {q: times.values(q, [vector])[0] for q in quantities(statement)}
        if not true_at(statement, vector, values):
            return Refuted(vector, region.cone)
        factor *= 4
