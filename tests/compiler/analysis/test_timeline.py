"""The timeline: the published tables to the last digit, an independent simulation on random schedules, deadlock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.analysis import batch, dependencies, timeline
from schedc.analysis import numba_kernels as compiled
from schedc.analysis.batch import simulate_batch
from schedc.analysis.deadlock import find_cycle
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_schedule
from schedc.analysis.timeline import simulate
from schedc.cost.batch import CostBatch
from schedc.cost.costs import Costs
from schedc.diagnostics import CompilerBug
from schedc.elaborate import elaborate
from schedc.ir.placement import linear, loop
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.syntax.parser import parse
from support import orders
from support.random_schedules import random_schedule

ZBH2 = """sched 1
schedule zbh2(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    let w = min(2*(P-1-r), M)
    let d = 2*r
    phase warmup repeat w { F }
    phase steady for i in 0 ..< M-w { F  I  if i >= d { W } }
    phase drain  for i in M-w ..< M { I  if i >= d { W } }
    phase flush  repeat min(d, M) { W }
  }
}
"""

OVERLAP = """sched 1
schedule overlap(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    let w = 2*(P-1-r) + 1
    phase warmup repeat w { F }
    phase steady repeat M - w { F & B }
    phase drain  repeat w { B }
  }
}
"""


def from_text(text: str, P: int, M: int) -> Schedule:
    return elaborate(parse(Source("test.sched", text)).schedules[0], {"P": P, "M": M})


def named(name: str, P: int, M: int) -> Schedule:
    texts = {"zbh2": ZBH2, "1f1b_overlap": OVERLAP}
    return from_text(texts[name], P, M) if name in texts else elaborate(open_schedule(name), {"P": P, "M": M})


# schedule, FB, P, M, makespan, largest makespan bubble, largest span less work
UNIT_COSTS = [
    ("gpipe", None, 4, 8, 33, 9, 9),
    ("1f1b", None, 4, 8, 33, 9, 9),
    ("1f1b", None, 8, 20, 81, 21, 21),
    ("interleaved_1f1b", None, 4, 8, 57, 9, 9),
    ("zbh1", None, 4, 8, 27, 3, 3),
    ("zbh1", None, 8, 20, 67, 7, 7),
    ("zbh2", None, 4, 8, 27, 3, 0),
    ("zbh2", None, 8, 20, 67, 7, 0),
    ("zbv", None, 4, 8, 51, 3, 0),
    ("zbv", None, 8, 20, 127, 7, 0),
    ("dualpipe", 3, 4, 8, 26, 2, None),
    ("dualpipe", 3, 8, 20, 66, 6, None),
    ("dualpipe", 2, 4, 8, 22, 1, None),
    ("dualpipe", 2, 8, 20, 52, 3, None),
    ("dualpipev", 3, 4, 8, 54, 6, None),
    ("dualpipev", 3, 8, 20, 134, 14, None),
    ("dualpipev", 2, 4, 8, 44, 3, None),
    ("dualpipev", 2, 8, 20, 104, 7, None),
    ("1f1b_overlap", 3, 4, 8, 33, 9, None),
    ("1f1b_overlap", 2, 4, 8, 26, None, None),
    ("1f1b_overlap", 3, 8, 20, 81, 21, None),
    ("1f1b_overlap", 2, 8, 20, 62, None, None),
]


@pytest.mark.parametrize(("name", "FB", "P", "M", "makespan", "bubble", "span_bubble"), UNIT_COSTS)
def test_unit_cost_table(
    name: str, FB: float | None, P: int, M: int, makespan: int, bubble: int | None, span_bubble: int | None
) -> None:
    timeline = simulate(named(name, P, M), Costs(FB=FB))
    assert timeline.makespan == makespan
    assert bubble is None or timeline.bubble.max() == bubble
    assert span_bubble is None or timeline.span_bubble.max() == span_bubble


# file, FB, makespan, bubble of every rank or None where they differ
PUBLISHED = [
    ("eager1f1b_P4_M8", None, 33, 9),
    ("loopedbfs_v2_P4_M8", None, 57, 9),
    ("seq1f1b_k2_P4_M8", None, 57, 9),
    ("interleaved_v2_P4_M8", None, 57, 9),
    ("interleaved_overlap_v2_P4_M8", 3, 57, 9),
    ("interleaved_overlap_v2_P4_M8", 2, 46, None),
    ("zbh1_quickstart_P4_M8", None, 27, 3),
    ("zbv_P4_M8", None, 51, 3),
    ("vhalf_P4_M8", None, 53, 5),
    ("vmin_P4_M8", None, 59, 11),
]


@pytest.mark.parametrize(("file", "FB", "makespan", "bubble"), PUBLISHED)
def test_published_orders(file: str, FB: float | None, makespan: int, bubble: int | None) -> None:
    schedule = orders.published(file)
    assert check_schedule(schedule) == []
    timeline = simulate(schedule, Costs(FB=FB))
    assert timeline.makespan == makespan
    assert bubble is None or timeline.bubble.tolist() == [bubble] * 4


def test_chimera_has_the_published_bubble_ratio() -> None:
    schedule = orders.published("chimera_P4_M4")
    assert simulate(schedule, Costs(B=1)).bubble_ratio == pytest.approx(0.2)
    assert simulate(schedule, Costs(B=2)).bubble_ratio == pytest.approx(0.25)


# Zero-bubble paper (arXiv 2401.10241): the inputs of Table 9 and the span bubble rates of Table 5, P = 8.
MEASURED = [
    (24, Costs(F=18.522, I=18.086, W=9.337, p2p=0.601), (0.2431, 0.1585, 0.1083)),
    (32, Costs(F=18.513, I=18.086, W=9.331, p2p=0.626), (0.1985, 0.1242, 0.0837)),
    (64, Costs(F=18.546, I=18.097, W=9.321, p2p=0.762), (0.1240, 0.0674, 0.0444)),
]


@pytest.mark.parametrize(("M", "costs", "rates"), MEASURED)
def test_measured_costs_table(M: int, costs: Costs, rates: tuple[float, ...]) -> None:
    found = [simulate(named(name, 8, M), costs).span_bubble_ratio for name in ("1f1b", "zbh1", "zbh2")]
    assert [round(rate, 4) for rate in found] == list(rates)


def test_the_span_bubble_ratio_counts_all_ranks_and_not_the_one_with_the_longest_span() -> None:
    # rank 0 runs first and last, and is idle most where its stage is light: the others are busy all the while
    light_first = Costs(F=(0.1, *[1.0] * 3), I=(0.1, *[1.0] * 3), W=(0.1, *[1.0] * 3))
    timeline = simulate(named("1f1b", 4, 64), light_first)
    assert int(timeline.span.argmax()) == 0
    assert timeline.span_bubble[0] / timeline.span[0] > 0.9
    assert timeline.span_bubble_ratio == pytest.approx(1 - timeline.busy.sum() / (4 * timeline.span[0]))
    assert timeline.span_bubble_ratio <= timeline.bubble_ratio < 0.3


@pytest.mark.parametrize(("P", "rounds"), [(2, 2), (3, 3), (4, 2), (8, 3)])
def test_closed_forms_with_latency(P: int, rounds: int) -> None:
    M, F, I, W, c = P * rounds, 18.5, 18.0, 9.3, 0.6  # noqa: E741
    costs = Costs(F=F, I=I, W=W, p2p=c)
    extra = {
        name: np.max(simulate(named(name, P, M), costs).span) - M * (F + I + W) for name in ("1f1b", "zbh1", "zbh2")
    }
    assert extra["1f1b"] == pytest.approx((P - 1) * (F + I + W) + (2 * (P - 1) * rounds + 2 * (P - 2)) * c)
    assert extra["zbh1"] == pytest.approx((P - 1) * (F + I - W) + 4 * (P - 1) * c)
    assert extra["zbh2"] == pytest.approx((P - 1) * (F + I - 2 * W) + 2 * (P - 1) * c) or rounds < 3


# An independent simulation: one op at a time, by names, with none of the columns.


def slow_ends(schedule: Schedule, costs: Costs) -> tuple[dict[str, float], float] | None:
    """End of every op and the makespan, or None where ranks wait for each other for ever."""
    of = costs.resolved(schedule.stages)
    cells: list[list[list[object]]] = [[] for _ in range(schedule.ranks)]
    for rank in range(schedule.ranks):
        for op in schedule.ops(rank):
            if op.pair >= 0 and cells[rank] and cells[rank][-1][0].pair == op.pair:  # type: ignore[attr-defined]
                cells[rank][-1].append(op)
            else:
                cells[rank].append([op])
    end: dict[str, float] = {}
    owner: dict[str, int] = {}
    free, progress = [0.0] * schedule.ranks, True
    while progress:
        progress = False
        for rank in range(schedule.ranks):
            if not cells[rank]:
                continue
            ops = cells[rank][0]
            needed = [n for op in ops for n in orders._needs(str(op), schedule.placement)]
            if any(n not in end for n in needed):
                continue
            ready = max([free[rank], *(end[n] + of.p2p * (owner[n] != rank) for n in needed)])
            first, last = ops[0], ops[-1]
            spent = getattr(of, first.kind.name)[first.stage]  # type: ignore[attr-defined]
            if first is not last:
                full = last.kind.name == "B"  # type: ignore[attr-defined]
                f, b = of.F[first.stage], getattr(of, last.kind.name)[last.stage]  # type: ignore[attr-defined]
                whole = f + b if of.FB is None else of.FB[first.stage]  # type: ignore[attr-defined]
                deferred = of.W[last.stage] * (of.FB is not None)  # type: ignore[attr-defined]
                spent = whole if full else max(whole - deferred, f, b)
            free[rank] = ready + spent
            end |= {str(op): free[rank] for op in ops}
            owner |= {str(op): rank for op in ops}
            cells[rank].pop(0)
            progress = True
    return None if any(cells) else (end, max(free))


def stage_costs(stages: int) -> st.SearchStrategy[Costs]:
    cost = st.integers(1, 9).map(float)
    either = cost | st.lists(cost, min_size=stages, max_size=stages).map(tuple)
    return st.builds(Costs, F=either, I=either, W=either, B=st.none() | either, FB=st.none() | either,
                     p2p=st.integers(0, 4).map(float))  # fmt: skip


@settings(max_examples=60)
@given(orders.orders(legal=True), st.data())
def test_timeline_equals_an_independent_simulation(schedule: Schedule, data: st.DataObject) -> None:
    assert check_schedule(schedule) == []
    costs = data.draw(stage_costs(schedule.stages))
    ends, makespan = slow_ends(schedule, costs) or pytest.fail("a legal order got stuck")
    timeline = simulate(schedule, costs)
    cell_of = timeline.dependencies.cell_of
    assert [timeline.end[cell_of[row]] for row in range(len(schedule))] == [
        ends[str(schedule.op(row))] for row in range(len(schedule))
    ]
    assert timeline.makespan == makespan
    batch = simulate_batch(timeline.dependencies, [costs, Costs(), costs])
    for k in (0, 2):
        assert batch.makespan[k] == makespan
        assert batch.bubble[:, k].tolist() == timeline.bubble.tolist()
        assert batch.span_bubble[:, k].tolist() == timeline.span_bubble.tolist()
        assert batch.bubble_ratio[k] == timeline.bubble_ratio
        assert batch.span_bubble_ratio[k] == timeline.span_bubble_ratio


# numba's loops and numpy's way.


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``run`` gives with numpy, and with the loops that numba compiles (interpreted where it is not there)."""
    loops = compiled.load() or compiled.Kernels(
        compiled.lockstep, compiled.assign_rows, compiled.advance, compiled.ends
    )
    found = []
    for answer in (None, loops):
        for module in (batch, dependencies, timeline):
            monkeypatch.setattr(module, "kernels", lambda _seconds, answer=answer: answer)
        found.append(run())
    return found[0], found[1]


def random_batch(seed: int, K: int, stages: int, pairs: bool) -> CostBatch:
    """K cost vectors that are no round numbers, per stage or not."""
    rng = np.random.default_rng(seed)
    shape = (K, stages) if seed % 2 else (K,)
    columns = {name: rng.uniform(0.1, 3.0, shape) for name in "FIW"}
    columns |= {"FB": rng.uniform(0.1, 6.0, shape)} if pairs else {}
    return CostBatch(**columns, p2p=rng.uniform(0, 1, K) * (seed % 3 > 0))


@pytest.mark.parametrize("seed", range(24))
def test_compiled_loops_give_the_same_bits_as_numpy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = random_schedule(seed)
    costs = random_batch(seed, 300, schedule.stages, seed % 4 > 0)  # more than run at a time

    def run() -> tuple[Any, ...]:
        known = Dependencies.of(schedule)
        found = simulate_batch(known, costs)
        alone = simulate(schedule, Costs(F=0.1, I=0.7, W=0.3, p2p=0.01 * seed), known)
        levels = known.levels
        return (*vars(levels).values(), *vars(found).values(), alone.start, alone.end, alone.busy, alone.bound_by)

    numpy_way, compiled_way = both_ways(monkeypatch, run)
    for one, other in zip(numpy_way, compiled_way, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def test_both_ways_find_the_same_cells_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = orders.schedule(["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"], linear(3, 2))
    first, second = both_ways(monkeypatch, lambda: Dependencies.of(schedule).levels)
    assert first.stuck.tolist() == second.stuck.tolist() != []
    assert first.of.tolist() == second.of.tolist()
    assert first.start.tolist() == second.start.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_gives_each_vector_what_it_gets_alone(seed: int) -> None:
    """To the last digit, but for sums of durations; that the same holds for lists of `Costs` is tested above."""
    schedule = random_schedule(seed)
    costs = random_batch(seed, 5, schedule.stages, seed % 4 > 0)
    found = simulate_batch(Dependencies.of(schedule), costs)
    for k in range(len(costs)):
        columns = {n: c for n, c in vars(costs).items() if c is not None}
        alone = Costs(**{n: tuple(c[k].tolist()) if c.ndim == 2 else float(c[k]) for n, c in columns.items()})
        expected = simulate(schedule, alone)
        assert (found.makespan[k], found.span[:, k].tolist()) == (expected.makespan, expected.span.tolist())
        assert found.busy[:, k].tolist() == pytest.approx(expected.busy.tolist(), rel=1e-14)


def test_a_batch_of_another_shape_is_our_fault() -> None:
    schedule = named("gpipe", 2, 2)
    with pytest.raises(CompilerBug, match="a batch of 3 for 2 stages"):
        simulate_batch(Dependencies.of(schedule), CostBatch(*np.ones((3, 3, 5))))


def test_a_small_run_never_loads_numba() -> None:
    program = (
        "import sys\nfrom schedc.cli import main\n"
        "try: main(['check', 'interleaved_1f1b', '-D', 'P=8', '-D', 'M=64'])\nexcept SystemExit: pass\n"
        "print('numba' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")


@settings(max_examples=30)
@given(orders.orders(legal=True), st.data())
def test_every_start_is_bound_by_what_it_waited_for(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(stage_costs(schedule.stages))
    timeline = simulate(schedule, costs)
    known = timeline.dependencies
    for cell, binding in enumerate(timeline.bound_by.tolist()):
        if binding < 0:
            assert timeline.start[cell] == 0
        else:
            latency = costs.p2p * (known.rank[binding] != known.rank[cell])
            assert timeline.start[cell] == timeline.end[binding] + latency


# Deadlock.


@settings(max_examples=150)
@given(orders.orders(legal=False))
def test_a_deadlock_is_found_exactly_where_execution_gets_stuck(schedule: Schedule) -> None:
    stuck = slow_ends(schedule, Costs()) is None
    assert [d.code for d in check_schedule(schedule)] == ["S301"] * stuck
    assert stuck != rendezvous_run_completes(schedule)
    cycle = find_cycle(Dependencies.of(schedule))
    for step, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        needed = schedule.op(step.needs)
        assert str(needed) in orders._needs(str(schedule.op(step.at)), schedule.placement)
        assert needed.rank == following.rank
        assert following.at <= step.needs  # that rank stands at or before the op that is waited for


def rendezvous_run_completes(schedule: Schedule) -> bool:
    """Runs messages as a Program does: tagless channels, sends complete when received, one global order of messages.

    The global order is that of the levels, continued by the cells that can never run. Every step may be taken at any
    time without changing what becomes possible (no receive is a wildcard), so that one run decides.
    """
    known = Dependencies.of(schedule)
    reached = known.levels.order.tolist()
    order = reached + sorted(set(range(len(known))) - set(reached))
    messages = [  # producer cell, consumer cell, in the global order of producers
        (producer, consumer)
        for producer in order
        for row in (0, 1)
        for consumer in np.flatnonzero(known.producers[row] == producer).tolist()
        if known.remote[row, consumer]
    ]
    head, posted, arrived = known.rank_start[:-1].tolist(), {}, set()
    progress = True
    while progress:
        progress = False
        for rank in range(schedule.ranks):
            if head[rank] == known.rank_start[rank + 1]:
                continue
            cell = head[rank]
            needed = [i for i, (_, consumer) in enumerate(messages) if consumer == cell]
            for i, (producer, consumer) in enumerate(messages):  # post receives up to the last one needed
                if needed and i <= needed[-1] and known.rank[consumer] == rank:
                    posted.setdefault((int(known.rank[producer]), rank, "receive"), {})[i] = None
            for channel in {(int(known.rank[messages[i][0]]), rank) for i in needed}:
                sends = list(posted.get((*channel, "send"), {}))
                receives = list(posted[(*channel, "receive")])
                assert sends == receives[: len(sends)] or receives == sends[: len(receives)], "swapped on a channel"
                arrived |= set(sends) & set(receives)
            if set(needed) <= arrived:
                head[rank] += 1
                progress = True
                for i, (producer, consumer) in enumerate(messages):
                    if producer == cell:
                        posted.setdefault((rank, int(known.rank[consumer]), "send"), {})[i] = None
    return all(h == stop for h, stop in zip(head, known.rank_start[1:].tolist(), strict=True))


def test_the_trail_of_a_deadlock_shows_each_wait_with_its_place() -> None:
    schedule = orders.schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], linear(2, 2))
    (found,) = check_schedule(schedule)
    assert found.position == ("S301", 1, 5)
    assert [label.span.line for label in found.secondary] == [2]
    assert found.notes == (
        "rank 0 at 0B0 (line 1:5) waits for 1B0 of rank 1 (line 2:13)",
        "<- rank 1 at 1F1 (line 2:1) waits for 0F1 of rank 0 (line 1:9)",
        "<- rank 0, at P = 2, M = 2",
    )


def test_the_shortest_cycle_is_shown() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 and it for rank 1: rank 0 is no part of the circle."""
    lines = ["0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1", "2F1 2B1 2F0 2B0"]
    assert find_cycle(Dependencies.of(orders.schedule(["0F0 0F1 0B0 0B1", *lines[1:]], linear(3, 2)))) == ()
    cycle = find_cycle(Dependencies.of(orders.schedule([lines[0], "1F0 1B0 1F1 1B1", lines[2]], linear(3, 2))))
    assert [wait.rank for wait in cycle] == [1, 2]


def test_a_circle_through_three_ranks() -> None:
    lines = [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",  # stands at 3F0 for 2F0 of rank 2
        "1F0 4F0 1F1 4F1 4B0 4B1 1B0 1B1",  # stands at 4F0 for 3F0 of rank 0
        "2F1 2F0 5F1 5F0 5B0 5B1 2B0 2B1",  # stands at 2F1 for 1F1 of rank 1
    ]
    cycle = find_cycle(Dependencies.of(orders.schedule(lines, loop(3, 2, 2))))
    assert [wait.rank for wait in cycle] == [0, 2, 1]


def test_a_circle_between_two_pipes() -> None:
    schedule = orders.schedule(["0F0 0B0 1F1 1B1", "0F1 0B1 1F0 1B0"], orders.two_pipes(2, 2))
    assert [wait.rank for wait in find_cycle(Dependencies.of(schedule))] == [0, 1]


def test_a_deadlock_has_no_timeline() -> None:
    schedule = orders.schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], linear(2, 2))
    with pytest.raises(CompilerBug, match="deadlock"):
        simulate(schedule)


def test_a_rank_without_ops_is_idle() -> None:
    """The analyses do not stumble over what only `verify` refuses."""
    timeline = simulate(orders.schedule(["0F0 0B0", ""], linear(2, 1)))
    assert timeline.bubble.tolist() == [0, 3]
    assert timeline.span_bubble.tolist() == [0, 0]
