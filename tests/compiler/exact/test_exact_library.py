"""What deciding rests on, for the library's schedules; and their claims, decided at every size of a range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from schedc.claims.check import check_claims
from schedc.claims.size_range import sizes_in
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.exact.cone import dot
from schedc.exact.space import Space
from schedc.exact.times import Edges, Simulations, simulations_on
from schedc.ir.schedule import Schedule
from schedc.load.library import names, open_schedule
from schedc.step.dependencies import Dependencies
from support.claim_oracle import grid, symbols_of
from support.random_claims import features
from support.random_schedules import random_schedule, with_recomputation
from support.sweeps import swept, thinned

RANGE = swept("P >= 2, P <= 16, M <= 64", "P >= 2, P <= 3, M <= 4")
CHAINS_RANGE = swept("P >= 2, P <= 8, M <= 24", "P >= 3, P <= 4, M >= 4, M <= 8")


def legal(name: str, text: str) -> Iterator[Schedule]:
    """A schedule of the library at the legal sizes of a range."""
    tree = open_schedule(name)
    for sizes in sizes_in(text, tree, {}):
        try:
            yield elaborate(tree, sizes)
        except DiagnosticError:
            continue


def simulations(schedule: Schedule) -> tuple[Space, list[Simulations]]:
    known = Dependencies.of(schedule)
    space = Space.of(known, {"p2p"})
    return space, [part for _, part in simulations_on(known, space, space.cone)]


def vectors(schedule: Schedule, count: int) -> list[tuple[int, ...]]:
    """Random vectors of costs of the domain."""
    symbols = symbols_of(Dependencies.of(schedule), {"p2p"})
    every, draw = grid(symbols), np.random.default_rng(len(schedule))
    return [tuple(every[row].values()) for row in draw.integers(len(every), size=count)]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(names(), 3))
def test_one_chain_leads_to_the_start_of_every_rank(name: str) -> None:
    """So that the span of a rank is convex in the costs: the subtracted start is one sum of costs."""
    seen = 0
    for schedule in legal(name, CHAINS_RANGE):
        _, (part,) = simulations(schedule)
        assert None not in part.chains
        assert "two chains to a start" not in features(schedule)
        seen += 1
        tried = vectors(schedule, 3)
        for vector, at in zip(tried, part.edges(tried), strict=True):
            assert [dot(form, vector) for form in part.chains if form is not None] == at.start
    assert seen


@pytest.mark.slow
def test_ends_are_convex_in_the_costs() -> None:
    """The end of every rank at the sum of two vectors is at most the sum of its ends: also of F & I, and with Rs."""
    schedules = [
        *(next(legal(name, "P == 4, M >= 4, M <= 8")) for name in names()),
        *(random_schedule(seed) for seed in range(15)),
        *(with_recomputation(random_schedule(seed), seed) for seed in range(15)),
    ]
    strict = 0
    for schedule in schedules:
        _, parts = simulations(schedule)
        some = vectors(schedule, 10)
        for first, second in zip(some[::2], some[1::2], strict=True):
            whole = tuple(a + b for a, b in zip(first, second, strict=True))
            at = [_longest(parts, vector) for vector in (whole, first, second)]
            for end, one, other in zip(*(edges.end for edges in at), strict=True):
                assert end <= one + other
                strict += end < one + other
    assert strict > 100


def _longest(parts: list[Simulations], vector: tuple[int, ...]) -> Edges:
    """The edges of the part whose F & I take longest there, which is the one that the vector lies in."""
    return max((part.edges([vector])[0] for part in parts), key=lambda edges: sum(edges.end))


@pytest.mark.slow
@pytest.mark.sweep
def test_every_claim_of_the_library_is_proved_at_every_size() -> None:
    """Or no costs satisfy its condition there; a policy's for the order that it chose."""
    statuses = Counter[str]()
    for name in names():
        tree = open_schedule(name)
        policy = tree.has_policy
        for schedule in legal(name, RANGE):
            for result in check_claims(tree.claims, schedule, follows_costs=policy):
                expected = ("order" if policy else "proved", "vacuous")
                assert result.status in expected, (name, schedule.sizes, result)
                statuses[result.status] += 1
    assert min(statuses[status] for status in ("proved", "order", "vacuous")) > 20, statuses
