"""What a step takes beside its pipeline: sums of gradients share the network with rows of experts and messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedc.model.spread import Spread
from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.price.states import Machine, RankLoads, gathered_bytes, kind_parameters, outside_pipeline
from schedc.planner.price.waterfall import waterfall
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.network import exchange_lanes, message
from schedc.planner.times.problem import PlanProblem
from schedc.planner.times.table import RunTable
from support.sweeps import halved

CLUSTER = open_cluster("h800", 256)
PROBLEM = PlanProblem(open_model("qwen3-30b-a3b").at(4096), CLUSTER, 256)
SPREAD = Spread(tp=1, cp=1, pp=2, vpp=1, ep=8, dp=64, zero=3)
PARAMETERS = kind_parameters(PROBLEM.model)


def machine(problem: PlanProblem) -> Machine:
    return Machine.of(RunTable([problem.run(RankSplit())]), problem.vectors)


MACHINE = machine(PROBLEM)


def loads(late: tuple[float, float] = (0.0, 0.0)) -> RankLoads:
    of_network = np.array(late)
    return RankLoads(np.array(1e9), np.array(4e9), np.array(12.0), of_network, 2.0 * of_network)


def sums(zero: int, pipeline: float, of_rank: RankLoads) -> float:
    return np.asarray(outside_pipeline(MACHINE, replace(SPREAD, zero=zero), of_rank, 4, pipeline).gradients).item()


def test_gathers_wait_for_rows_that_take_the_nics() -> None:
    alone = sums(3, 0.0, loads())
    assert alone > 0
    assert sums(3, 0.0, loads(late=(0.0, 0.5))) == pytest.approx(alone + 4 * 2 * 0.5)
    assert sums(3, alone + 4.0, loads(late=(0.0, 0.5))) == 0
    assert sums(3, 0.0, loads(late=(0.5, 0.0))) == alone, "rows inside a node leave the NICs free"


@pytest.mark.parametrize("zero", [0, 1])
def test_sums_hide_beside_compute_alone(zero: int) -> None:
    """Four microbatches on two ranks: a backward is a tenth of the pipeline."""
    alone = sums(zero, 0.0, loads())
    assert sums(zero, 2.5 * alone, loads()) == pytest.approx(0.75 * alone)
    assert sums(zero, 2.5 * alone, loads((0.0, 0.125 * alone))) == pytest.approx(0.875 * alone)
    assert sums(zero, 2.5 * alone, loads((0.0, 9.0 * alone))) == alone
    assert sums(zero, 20.0 * alone, loads()) == 0


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("zero", halved([0, 1, 2, 3]))
def test_a_shorter_pipeline_makes_no_step_longer(zero: int) -> None:
    pipelines = np.linspace(0.0, 40.0 * sums(zero, 0.0, loads()), 200)
    for late in (0.0, 0.2, 5.0):
        steps = [pipeline + sums(zero, pipeline, loads((late, late))) for pipeline in pipelines.tolist()]
        assert (np.diff(steps) >= 0).all()


def test_loads_are_those_of_the_fullest_rank() -> None:
    splits = [RankSplit(ep=8), RankSplit(ep=64, alltoall="hierarchical")]
    table = PartTable.of(PROBLEM, splits)
    counts = np.zeros((2, table.forward.shape[1] - 1))
    counts[:, 2] = 20, 28
    shared = table.loads(np.arange(2), counts, PARAMETERS, 2)
    each = [table.loads(np.array([row]), counts[None], PARAMETERS, 2) for row in range(2)]
    for row, one in enumerate(each):
        np.testing.assert_array_equal(one.busy[:, 0], shared.busy[:, row])
    assert shared.experts == pytest.approx(28 * PARAMETERS[2, 1])
    np.testing.assert_allclose(shared.late, [2 * 28 * table.node, 2 * 28 * table.rail])
    np.testing.assert_allclose(shared.busy - 2 * shared.late, np.broadcast_to(2 * table.p2p, (2, 2)))


def test_parts_that_are_gathered_lie_there_whole() -> None:
    own, experts = PARAMETERS.T
    layer = 2 * (own[2] + experts[2] / SPREAD.ep)
    assert gathered_bytes(PARAMETERS, SPREAD) == pytest.approx(layer + max(layer, 2 * own[0], 2 * own[4]))
    assert gathered_bytes(PARAMETERS, replace(SPREAD, zero=2)) == 0


def with_start(seconds: float) -> Cluster:
    levels = tuple(replace(level, alpha_s=seconds) for level in CLUSTER.levels)
    return replace(CLUSTER, levels=levels)


def test_networks_take_their_start() -> None:
    """The start of a level enters messages, keys around context ranks and sums of gradients."""
    run = PROBLEM.run(RankSplit(cp=4, ep=8))
    slow = replace(PROBLEM, cluster=with_start(1.0))
    at_once = replace(PROBLEM, cluster=with_start(0.0))
    times = [message(RunTable([replace(run, problem=each)]), PROBLEM.vectors) for each in (slow, at_once)]
    assert (times[0] - times[1]).item() == pytest.approx(1.0)
    rings = [np.asarray(outside_pipeline(machine(each), SPREAD, loads(), 1, 0.0).gradients) for each in (slow, at_once)]
    dense, experts = (8 - 1) + (8 - 1), 8 - 1
    assert (rings[0] - rings[1]).item() == pytest.approx((dense + experts) * (4 + 2 * 2) / (4 + 2))


@pytest.mark.parametrize(("method", "far", "near"), [("flat", 56, 7), ("hierarchical", 7, 7), ("allgather", 7, 7)])
def test_rows_start_with_each_rank_they_go_to(method: str, far: int, near: int) -> None:
    table = RunTable([PROBLEM.run(RankSplit(ep=64, alltoall=method))])
    slow, at_once = (replace(PROBLEM, constants={"ep_peer": seconds, "ep_alpha": 0.0}) for seconds in (1.0, 0.0))
    lanes = [exchange_lanes(table, each.vectors) for each in (slow, at_once)]
    started = [(late - early).item() for late, early in zip(*lanes, strict=True)]
    assert started == pytest.approx([far, near])


@pytest.mark.parametrize("layout", ["even", "apart"])
def test_the_host_takes_its_constant_and_seconds_for_each_layer_of_the_fullest_rank(layout: str) -> None:
    """48 layers on 5 ranks: some have 10 or more, and the host's part of the step is exactly that of the fullest."""
    axes = PlanAxes(1, 1, 5, 1, 8, 64, 1, 1, 16, "1f1b", layout=layout)
    constants = {"host": 0.25, "step": 0.125}
    problem = replace(PROBLEM, cluster=open_cluster("h800", 320), sequences=1024, constants=constants)
    planned = PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split]))
    ranks = planned.placement.rank_of_stage[0]
    layers = planned.layout.counts[:, [WORK.index(PartKind.DENSE), WORK.index(PartKind.MOE)]].sum(axis=1)
    fullest = max(layers[ranks == rank].sum() for rank in range(5))
    plan = price_plan(planned)
    assert fullest >= 10
    assert plan.beside.host == 0.125 + 0.25 * fullest
    assert waterfall(plan)[-1] == ("host of a step", pytest.approx(plan.beside.host, rel=1e-12))
