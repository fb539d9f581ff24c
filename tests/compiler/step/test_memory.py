"""Memory curves: the published peaks, and an independent count of what is held on random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.elaborate import elaborate
from schedc.ir.placement import linear
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from support import orders
from support.sweeps import swept

PEAKS = [
    ("gpipe_P4_M8", [8, 8, 8, 8]),
    ("1f1b_P4_M8", [4, 3, 2, 1]),
    ("eager1f1b_P4_M8", [7, 5, 3, 1]),
    ("interleaved_v2_P4_M8", [11, 9, 7, 5]),
    ("interleaved_overlap_v2_P4_M8", [12, 10, 8, 6]),
    ("loopedbfs_v2_P4_M8", [16, 16, 16, 16]),
    ("seq1f1b_k2_P4_M8", [5, 4, 3, 2]),
    ("1f1b_overlap_P4_M8", [8, 6, 4, 2]),
    ("zbh1_P4_M8", [4, 4, 4, 4]),
    ("zbh2_P4_M8", [7, 7, 7, 7]),
    ("zbv_P4_M8", [8, 8, 8, 8]),
    ("vhalf_P4_M8", [6, 6, 6, 6]),
    ("vmin_P4_M8", [4, 4, 4, 4]),
    ("dualpipe_P4_M8", [5, 5, 5, 5]),
    ("dualpipev_P4_M8", [9, 9, 9, 9]),
    ("chimera_P4_M4", [3, 4, 4, 3]),
]


@pytest.mark.parametrize(("file", "peaks"), PEAKS)
def test_published_peaks(file: str, peaks: list[int]) -> None:
    assert measure_memory(orders.published(file)).peak_activations.tolist() == peaks


def test_inside_a_pair_one_more_is_held_than_between_cells() -> None:
    """DualPipe: P + 1 inside pairs; between cells only the middle ranks, with a forward outside a pair, reach it."""
    memory = measure_memory(elaborate(open_schedule("dualpipe"), {"P": 8, "M": 20}))
    assert memory.peak_activations.tolist() == [9] * 8
    assert memory.peak_activations_between.tolist() == [8, 8, 8, 9, 9, 8, 8, 8]


def test_what_each_op_holds_and_frees() -> None:
    schedule = orders.schedule(["0F0 0F1 0I0 (0F2;0B1) 0W0 0I2 0W2"], linear(1, 3))
    memory = measure_memory(schedule, Costs(activation=10, pending_weight=4))
    assert memory.activations.tolist() == [1, 2, 2, 2, 1, 1, 0]
    assert memory.activations_inside.tolist() == [1, 2, 2, 3, 2, 1, 1]
    assert memory.pending_weight.tolist() == [0, 0, 1, 1, 0, 1, 0]
    assert memory.memory.tolist() == [10, 20, 14, 14, 10, 4, 0]
    assert memory.memory_inside.tolist() == [10, 20, 20, 24, 14, 10, 4]
    assert (memory.peak_memory.tolist(), memory.peak_pending_weight.tolist()) == ([24], [1])


@pytest.mark.parametrize("P", [2, 4, 7])
def test_zbh1_holds_what_the_paper_says(P: int) -> None:
    """arXiv 2401.10241, 2.1: worker i (from 1) holds (P - i + 1) M_B + (i - 1) M_W."""
    costs = Costs(activation=34, pending_weight=32)
    memory = measure_memory(elaborate(open_schedule("zbh1"), {"P": P, "M": 3 * P}), costs)
    assert memory.peak_memory.tolist() == [(P - i + 1) * 34 + (i - 1) * 32 for i in range(1, P + 1)]


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(orders.orders(legal=True), st.data())
def test_curves_equal_an_independent_count(schedule: Schedule, data: st.DataObject) -> None:
    stages = schedule.stages
    sizes = [st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages).map(tuple) for _ in range(2)]
    costs = Costs(activation=data.draw(sizes[0]), pending_weight=data.draw(sizes[1]))
    memory = measure_memory(schedule, costs)
    dependencies = memory.dependencies
    for rank in range(schedule.ranks):
        held: dict[tuple[int, int], float] = {}
        pending: set[tuple[int, int]] = set()
        largest = {"count": 0, "memory": 0.0}
        for row in range(int(schedule.rank_start[rank]), int(schedule.rank_start[rank + 1])):
            op = schedule.op(row)
            key = (op.stage, op.microbatch)
            if op.kind.name == "F":
                held[key] = costs.activation[op.stage]  # type: ignore[index]
            elif op.kind.name == "I":
                held[key] = costs.pending_weight[op.stage]  # type: ignore[index]
                pending.add(key)
            else:
                del held[key]
                pending.discard(key)
            largest = {"count": max(largest["count"], len(held)), "memory": max(largest["memory"], sum(held.values()))}
            cell = int(dependencies.cell_of[row])
            if row == max(dependencies.first[cell], dependencies.second[cell]):
                assert memory.activations[cell] == len(held)
                assert memory.pending_weight[cell] == len(pending)
                assert memory.memory[cell] == sum(held.values())
        assert not held
        assert memory.peak_activations[rank] == largest["count"]
        assert memory.peak_memory[rank] >= largest["memory"]
