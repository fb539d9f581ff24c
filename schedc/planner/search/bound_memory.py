"""A bound of the bytes of the fullest rank, for many plans of one placement: no order is made.

Ranks hold at least as many microbatches as shipped schedules claim of their peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.elaborate.evaluate import RANK, Evaluator, Scope
from schedc.elaborate.walk import parts
from schedc.ir.arrays import Floats, Int64
from schedc.planner.search.placed_counts import PlacedCounts
from schedc.planner.space.schedules import ScheduleChoice
from schedc.syntax import tree as t

_METRIC = "peak_activations"


class ClaimedPeaks(NamedTuple):
    """Chunks in memory at the peaks of ranks, each of one microbatch.

    of_rank: [ranks] what every rank holds at least. largest: what the fullest rank holds at least.
    """

    of_rank: Int64
    largest: int


def claimed_peaks(choice: ScheduleChoice, sizes: dict[str, int], ranks: int) -> ClaimedPeaks:
    """What equations of a schedule's file say of its peaks; 0 where they say nothing.

    Tests decide the claims of shipped schedules at many sizes. Those of other files are not believed, nor those of
    orders that depend on costs.
    """
    nothing = ClaimedPeaks(np.zeros(ranks, np.int64), 0)
    if not choice.shipped or choice.by_policy:
        return nothing
    try:
        evaluator, scope = choice.evaluated(sizes)
        peaks = nothing
        for claim in choice.tree.claims:
            peaks = _with_claim(peaks, claim, evaluator, scope)
    except DiagnosticError:
        return nothing
    return peaks


def _with_claim(peaks: ClaimedPeaks, claim: t.Claim, evaluator: Evaluator, scope: Scope) -> ClaimedPeaks:
    ranks = peaks.of_rank.size
    if not isinstance(claim.claim, t.Binary) or claim.claim.op != "==" or not _applies(claim, evaluator, scope):
        return peaks
    match claim.claim.left:
        case t.Name(id=name) if name == _METRIC:
            return peaks._replace(largest=max(peaks.largest, int(evaluator.value(claim.claim.right, scope))))
        case t.Index(name=name, index=t.Name(id=rank)) if name == _METRIC:
            every = np.arange(ranks, dtype=np.int64)
            inside = Scope(ranks, {rank: every, RANK: every}, scope, lambda: np.zeros(ranks, np.int64))
            value = np.broadcast_to(evaluator.value(claim.claim.right, inside), (ranks,))
            return peaks._replace(of_rank=np.maximum(peaks.of_rank, value))
        case _:
            return peaks


def _applies(claim: t.Claim, evaluator: Evaluator, scope: Scope) -> bool:
    """Whether a claim has no condition, or one on sizes alone that holds."""
    if claim.condition is None:
        return True
    return all(scope.has(name) for name in _names(claim.condition)) and bool(evaluator.value(claim.condition, scope))


def _names(expr: t.Expr) -> set[str]:
    own = {expr.id} if isinstance(expr, t.Name) else set()
    return own.union(*(_names(part) for part in parts(expr)))


class HeldOfRanks(NamedTuple):
    """[prefixes, levels, P] bytes that ranks hold of one microbatch.

    whole: of all stages of a rank: each holds one microbatch when the last forward of that microbatch is done. least:
    of the stage of a rank that holds least.
    """

    whole: Floats
    least: Floats

    @classmethod
    def of(
        cls, counts: PlacedCounts, held: Floats, pending: Floats, levels: Sequence[tuple[str, str]], splits: bool
    ) -> HeldOfRanks:
        """held: [prefixes, levels, kinds] by `LEVELS`; pending: [prefixes, kinds] between I and W."""
        waiting, plain = (bytes @ counts.of_stage.T for bytes in (pending, held[:, 0]))
        whole, least = [], []
        for number, applies in (counts.at_level(*level) for level in levels):
            stages = np.where(applies > 0, held[:, number] @ counts.of_stage.T, plain)
            whole.append(stages @ counts.on_rank.T)
            either = np.minimum(stages, waiting) if splits else stages
            least.append(counts.of_chunks(either, np.inf).min(axis=-1))
        return cls(np.stack(whole, axis=1), np.stack(least, axis=1))


def bytes_of_counts(
    counts: PlacedCounts, parameters: Floats, held: HeldOfRanks, peaks: Sequence[Sequence[ClaimedPeaks]]
) -> Floats:
    """[prefixes, orders, levels, zeros] bytes of the fullest rank, at least, with the layout of ``counts``.

    parameters: [prefixes, zeros, kinds] bytes of a part. peaks: [orders][prefixes] what the schedule's file claims.
    """
    own = parameters @ (counts.on_rank @ counts.of_stage).T  # [prefixes, zeros, P]
    result = []
    for of_order in peaks:
        claimed = np.stack([peak.of_rank for peak in of_order])[:, None, :]
        largest = np.array([peak.largest for peak in of_order], np.float64)[:, None, None]
        every = np.maximum(held.whole, claimed * held.least)
        fullest = (own[:, None] + every[:, :, None]).max(axis=3)
        some = (own[:, None] + (largest * held.least)[:, :, None]).min(axis=3)
        result.append(np.maximum(fullest, some))
    return np.stack(result, axis=1)
