"""Finds a better order in which any forward and backward of a rank may be a pair: `schedc tune --pairs make`.

Pairs come from known orders, never from the search. A list schedule that pairs what is ready uses up partners early.
Known are the orders of the library with the same placement, and the paired wave. It has F of stage s
in slot s, and I in slot 2S-1-s. Microbatches follow two slots apart, and units of P of them S slots apart. In its
steady state each slot of a rank has an F and an I. `schedc.search.tune` then moves the cells of each, pairs included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.arrays import Floats, Int64
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.bounds import OpWindows
from schedc.search.problem import Freedom, problem_of, searched_ops, stage_key
from schedc.search.solver import Effort
from schedc.search.split import split_backwards
from schedc.search.tune import Judge, JudgedSchedule, TuningResult, bound_without_search, refuse_unsearched, tune
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.legality import check_schedule
from schedc.step.timeline import simulate
from schedc.syntax.parser import parse

WAVE = "paired wave"
"""Name of the wave among the origins of an order."""
_TRIED = 4
"""Most orders whose cells are moved. They are the shortest of all."""
_ROOMS = (1, 2)
"""Chunks that the paired wave may hold beyond a microbatch of each rank, for weight gradients."""
_SAME = 1e-9
"""Relative difference below which two makespans are equal."""
_TEXT = """sched 1

schedule paired_wave(P: ranks = 4, M: microbatches = 8, v: count = 2, n: count = 1) {
  place map(v*P) { stage s on rank (s % P if (s // P) % 2 == 0 else P-1 - s % P) }
  rank r {
    timed pair fill W within v*P + n {
      for m in 0 ..< M {
        let start = v*P*(m // P) + 2*(m % P)
        for j in 0 ..< v {
          let s = j*P + (r if j % 2 == 0 else P-1-r)
          F[j] at start + s
          I[j] at start + 2*v*P - 1 - s
        }
      }
    }
  }
}
"""


def tune_pairs(
    seed: Schedule,
    costs: Costs,
    *,
    caps: Floats | None = None,
    split: bool = False,
    effort: Effort | None = None,
    known: Iterable[tuple[str, Schedule]] = (),
    progress: Callable[[float, float], None] = lambda best, bound: None,
) -> TuningResult:
    """The order with the least makespan that is found within ``effort``, with any pairs of the seed's ops or none.

    The bound holds for every choice of pairs.
    caps: [P], known, progress: as in `tune`. split: full backwards may be split.
    Raises `DiagnosticError` as `tune` does, and S415 for costs that differ by microbatch.
    """
    effort, freedom = effort or Effort(), Freedom(split=split, make_pairs=True)
    refuse_unsearched(seed, freedom)
    problem = problem_of(seed, costs, caps, freedom)
    ticks, floor = bound_without_search(OpWindows(problem), "makespan")
    bound, judged = problem.cost(ticks), Judge(costs, caps, "makespan")(seed)
    results = list(_results(seed, costs, caps, split, list(known), effort, bound, progress))
    origin, best = min(results, key=lambda result: result[1].best.value)
    searches = [result.search for _, result in results if result.search is not None]
    missed = best.best.value > bound * (1 + _SAME)
    ours = origin or best.origin
    order = best.best if not origin else _named(best.best, seed)
    least = min(bound, best.best.value)
    return TuningResult("makespan", problem, caps, judged, judged if ours == "seed" else order, ours, least,
                        floor if bound <= least * (1 + _SAME) else None, least,
                        searches[-1] if searches and missed else None, freedom, effort)  # fmt: skip


def _results(
    seed: Schedule,
    costs: Costs,
    caps: Floats | None,
    split: bool,
    known: Sequence[tuple[str, Schedule]],
    effort: Effort,
    bound: float,
    progress: Callable[[float, float], None],
) -> Iterator[tuple[str, TuningResult]]:
    """The best order with the pairs of each start, and the name of the start: empty for the seed. Ends at the bound."""
    starts = [("", seed), *_starts(seed, split, known)]
    starts = sorted(starts, key=lambda start: simulate(start[1], costs).makespan)[:_TRIED]
    if not any(name == "" for name, _ in starts):
        starts.append(("", seed))
    began, refused, count = perf_counter(), None, 0
    for number, (name, start) in enumerate(starts):
        share = _share(effort, perf_counter() - began, len(starts) - number)
        try:
            result = tune(start, costs, caps=caps, freedom=Freedom(split=split), effort=share, known=known,
                          progress=lambda best, _: progress(best, bound))  # fmt: skip
        except DiagnosticError as error:
            refused = error
            continue
        count += 1
        yield name, result
        if result.best.value <= bound * (1 + _SAME):
            return
    if not count and refused is not None:
        raise refused


def _share(effort: Effort, taken: float, left: int) -> Effort:
    """The part of the effort for the next search. taken: seconds so far. left: searches with it."""
    if effort.seconds is None:
        return replace(effort, work=None if effort.work is None else effort.work / left)
    return replace(effort, seconds=max(0.1, (effort.seconds - taken) / left))


def _starts(seed: Schedule, split: bool, known: Iterable[tuple[str, Schedule]]) -> Iterator[tuple[str, Schedule]]:
    """Known orders with pairs that have the seed's ops, with their backwards split as its are."""
    ops = _ops(searched_ops(seed, Freedom(split=split)))
    for name, order in [*known, *((WAVE, wave) for wave in paired_waves(seed))]:
        if order.placement != seed.placement or not (order.pair >= 0).any():
            continue
        for same in (order, split_backwards(order)):
            if np.array_equal(_ops(searched_ops(same, Freedom(split=split))), ops):
                yield name, same
                break


def _ops(schedule: Schedule) -> Int64:
    """[ops, 3] stage, kind, and microbatch in the sequence of the stage. Orders of the same ops have equal ones."""
    queue = stage_key(schedule) * len(OpKind) + schedule.kind
    rows = np.argsort(queue, kind="stable")
    return np.stack([queue[rows], schedule.stage[rows], schedule.microbatch[rows]], axis=1).astype(np.int64)


def paired_waves(seed: Schedule) -> Iterator[Schedule]:
    """The paired wave at the seed's sizes, with different room for weight gradients. None where it deadlocks."""
    v, tree = seed.stages // seed.ranks, parse(Source("paired_wave.sched", _TEXT)).schedules[0]
    if seed.stages != v * seed.ranks or seed.placement.pipes > 1:
        return
    for room in _ROOMS:
        sizes = {"P": seed.ranks, "M": seed.microbatches, "v": v, "n": room}
        try:
            order = elaborate(tree, sizes)
        except DiagnosticError:
            continue  # the slots clash, or the room is too little
        if not check_schedule(order):
            yield order


def _named(order: JudgedSchedule, seed: Schedule) -> JudgedSchedule:
    """The order under the name and the sizes of the seed, which it has the ops of."""
    schedule = replace(order.schedule, name=seed.name, sizes=seed.sizes, doc=seed.doc, layout=seed.layout,
                       layers=seed.layers, plan=seed.plan, tied=seed.tied, segments=seed.segments)  # fmt: skip
    return replace(order, schedule=schedule)
