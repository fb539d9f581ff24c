"""The timeline: the published tables to the last digit, and an independent simulation on random schedules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.step.timeline_cases import slow_ends
from schedc.diagnostics import CompilerBug
from schedc.elaborate import elaborate
from schedc.ir.placement import linear
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.step import dependencies, walk
from schedc.step import numba_kernels as compiled
from schedc.step.batch import simulate_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.timeline import simulate
from schedc.syntax.parser import parse
from support import orders
from support.random_schedules import random_schedule
from support.sweeps import swept

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


def stage_costs(stages: int) -> st.SearchStrategy[Costs]:
    cost = st.integers(1, 9).map(float)
    either = cost | st.lists(cost, min_size=stages, max_size=stages).map(tuple)
    return st.builds(Costs, F=either, I=either, W=either, B=st.none() | either, FB=st.none() | either,
                     p2p=st.integers(0, 4).map(float))  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(60, 30))
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
    loops = compiled.load() or (lambda loop: loop)
    found = []
    for answer in (None, loops):
        for module in (dependencies, walk):
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_rank_without_ops_is_idle() -> None:
    """The analyses do not stumble over what only `verify` refuses."""
    timeline = simulate(orders.schedule(["0F0 0B0", ""], linear(2, 1)))
    assert timeline.bubble.tolist() == [0, 3]
    assert timeline.span_bubble.tolist() == [0, 0]
