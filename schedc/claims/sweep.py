"""Every check at every size of a range, over several processes: legality, deadlock and claims."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from math import prod
from multiprocessing import active_children, get_context
from typing import Any

from schedc.claims.check import STATUSES, Status, check_claims
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.interrupts import unheard
from schedc.step.costs.costs import Costs
from schedc.step.costs.given import check_given
from schedc.step.legality import check_schedule
from schedc.step.op_times import Pricer
from schedc.syntax.tree import ScheduleTree

REFUSED = frozenset({"S113", "S114"})
"""Codes of sizes that a schedule is not made for: skipped and counted."""

_IN_PROCESS = 48
"""Number of sizes up to which one process is faster than starting a second one."""

_BATCH = 8

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Outcome:
    """The result at one size. claims: [claims] the status of each."""

    sizes: Sizes
    refused: bool
    diagnostics: tuple[Diagnostic, ...]
    claims: tuple[Status, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """The results over a range of sizes.

    tried: number of sizes checked. refused: number of further sizes that the schedule is not made for.
    failing: the tried sizes with findings, by their product. smallest: the first of these.
    claims: [claims] text, and the number of sizes by status (`schedc.claims.check.ClaimResult`).
    """

    tried: int
    refused: int
    failing: tuple[Sizes, ...]
    smallest: Outcome | None
    claims: tuple[tuple[str, Mapping[Status, int]], ...]

    @property
    def failed(self) -> int:
        return len(self.failing)

    def to_json(self) -> dict[str, Any]:
        smallest = self.smallest
        return {
            "tried": self.tried,
            "refused": self.refused,
            "failed": self.failed,
            "smallest_failing": dict(smallest.sizes) if smallest else None,
            "failing": [dict(sizes) for sizes in self.failing],
            "expect": [{"claim": text, **counts} for text, counts in self.claims],
            "diagnostics": [d.to_json() for d in smallest.diagnostics] if smallest else [],
        }


def sweep(
    tree: ScheduleTree,
    sizes: Sequence[Sizes],
    costs: Costs,
    progress: Callable[[int], None] | None = None,
    processes: int | None = None,
    pricer: Pricer | None = None,
) -> Sweep:
    """Check a schedule at all of ``sizes``. progress: called with the number of sizes just done.

    pricer: judges the orders of a `policy`, where the costs have a table of cells.
    processes: by default one per usable core. One process, or few sizes, starts no other.
    """
    outcomes = []
    with closing(_outcomes(tree, sizes, costs, processes or len(os.sched_getaffinity(0)), pricer)) as batches:
        for batch in batches:
            outcomes += batch
            if progress:
                progress(len(batch))
    failed = sorted((o for o in outcomes if o.diagnostics and not o.refused), key=_smallness)
    tried = [o for o in outcomes if not o.refused]
    failing = tuple(outcome.sizes for outcome in failed)
    return Sweep(len(tried), len(outcomes) - len(tried), failing, failed[0] if failed else None, _claims(tree, tried))


def _smallness(outcome: Outcome) -> tuple[int, tuple[int, ...]]:
    values = tuple(outcome.sizes.values())
    return prod(values), values


def _claims(tree: ScheduleTree, outcomes: list[Outcome]) -> tuple[tuple[str, Mapping[Status, int]], ...]:
    verdicts = [o.claims for o in outcomes if o.claims]
    result = []
    for number, claim in enumerate(tree.claims):
        counts = Counter(verdict[number] for verdict in verdicts)
        text = f"{claim.text} when {claim.condition_text}" if claim.condition_text else claim.text
        result.append((text, {status: counts[status] for status in STATUSES}))
    return tuple(result)


def _outcomes(
    tree: ScheduleTree, sizes: Sequence[Sizes], costs: Costs, processes: int, pricer: Pricer | None
) -> Generator[list[Outcome]]:
    # Large sizes come first, so that no process is left with several of them at the end.
    largest_first = sorted(sizes, key=lambda s: -prod(s.values()))
    if processes == 1 or len(sizes) <= _IN_PROCESS:
        for size in largest_first:
            yield _check_batch(tree, [size], costs, pricer)
        return
    batches = [largest_first[low : low + _BATCH] for low in range(0, len(largest_first), _BATCH)]
    others = set(active_children())
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))  # not forked: the caller may have threads
    try:
        with unheard():
            pending = [pool.submit(_check_batch, tree, batch, costs, pricer) for batch in batches]
        for future in as_completed(pending):
            yield future.result()
    except BaseException:  # their remaining work is of no use
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_batch(tree: ScheduleTree, sizes: Sequence[Sizes], costs: Costs, pricer: Pricer | None) -> list[Outcome]:
    return [_check_one(tree, size, costs, pricer) for size in sizes]


def _check_one(tree: ScheduleTree, sizes: Sizes, costs: Costs, pricer: Pricer | None) -> Outcome:
    try:
        schedule = elaborate(tree, sizes, costs, pricer)
    except DiagnosticError as error:
        return Outcome(sizes, {d.code for d in error.diagnostics} <= REFUSED, error.diagnostics)
    if findings := check_schedule(schedule):
        return Outcome(sizes, False, tuple(findings))
    try:
        check_given(costs, schedule)
        results = check_claims(tree.claims, schedule, costs, follows_costs=tree.has_policy)
    except DiagnosticError as error:
        return Outcome(sizes, False, error.diagnostics)
    findings_of_claims = tuple(r.diagnostic for r in results if r.diagnostic is not None)
    return Outcome(sizes, False, findings_of_claims, tuple(r.status for r in results))
