"""One time per message: that of the slowest boundary between ranks of a pipeline, so that no step is priced too low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import read_back
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import RankSplit
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.step.op_times import OpTimes


def same_node(cluster: Cluster, block: int, rank: int, other: int) -> bool:
    """Whether all devices of a pipeline rank, a block of neighbours, share nodes with their peers of another one."""
    near = cluster.levels[0].size
    return all((rank * block + device) // near == (other * block + device) // near for device in range(block))


@pytest.mark.parametrize("name", files("clusters"))
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_message_takes_the_time_of_the_slowest_boundary(name: str, nodes: int) -> None:
    near = open_cluster(name).levels[0].size
    cluster = open_cluster(name, nodes * near)
    problem = PlanProblem(replace(open_model("llama-3.1-8b"), seq=4096), cluster, 64)
    table = PartTable.of(problem, [RankSplit(tp=tp) for tp in (1, 2)])
    inside, over = cluster.levels[:2]
    for pp in (pp for pp in (2, 4, 8, 16) if cluster.devices % (2 * pp) == 0):
        block = cluster.devices // pp
        shared = [same_node(cluster, block, rank, rank + 1) for rank in range(pp - 1)]
        for tp, p2p in zip((1, 2), table.p2p.tolist(), strict=True):
            bytes = 2 * problem.model.seq * problem.model.hidden / tp
            levels = [inside if near_by else over for near_by in shared]
            times = [level.alpha_s + bytes / cluster.device_Bps(level) for level in levels]
            assert p2p == pytest.approx(max(times))
        if block >= near:
            assert not any(shared)
        if nodes == 1:
            assert all(shared)


def test_boundaries_inside_a_node_take_little_from_a_step() -> None:
    conditions = ("schedule in zbv", "pp == 8", "tp == 1", "cp == 1", "zero == 1", "microbatch == 1")
    required = [read_condition(text) for text in conditions]
    space = PlanSpace.of(open_model("llama-3.1-8b"), open_cluster("h100", 16), 64, 4096, "standard", required)
    problem = PlanProblem(space.model, space.cluster, 64)
    (plan,) = search(space, problem, SearchOptions(policy_seconds=0.0, top=1)).plans
    assert plan.priced is not None
    levels = space.cluster.levels
    faster = space.cluster.device_Bps(levels[1]) / space.cluster.device_Bps(levels[0])
    p2p = read_back(plan.priced.planned).costs.p2p
    priced, own, fastest = (
        makespan_of(plan.priced.planned, latency)
        for latency in (
            lambda _rank, _other: p2p,
            lambda rank, other: p2p * faster if same_node(space.cluster, 2, rank, other) else p2p,
            lambda _rank, _other: p2p * faster,
        )
    )
    assert priced == pytest.approx(plan.priced.makespan, rel=1e-12)
    assert fastest <= own < priced
    assert (priced - own) / plan.step_s < 0.01


def makespan_of(planned: object, latency: Callable[[int, int], float]) -> float:
    """Seconds of a pipeline without pairs, op by op, with a latency for each pair of ranks."""
    result = read_back(planned)  # type: ignore[arg-type]
    cells, times = result.dependencies, OpTimes.of(result.costs, result.schedule).alone
    kind, stage, rank = result.schedule.kind, result.schedule.stage, cells.rank.tolist()
    ends = np.zeros(len(cells))
    for cell in cells.levels.order.tolist():
        start = ends[cells.previous[cell]] if cells.previous[cell] >= 0 else 0.0
        for row in range(2):
            producer = cells.producers[row, cell]
            if producer >= 0:
                message = latency(rank[producer], rank[cell]) if cells.remote[row, cell] else 0.0
                start = max(start, ends[producer] + message)
        ends[cell] = start + times[kind[cells.first[cell]]][stage[cells.first[cell]]]
    return float(ends.max())
