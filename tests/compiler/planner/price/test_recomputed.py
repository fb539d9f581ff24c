"""Recomputation of plans: one rule for plans with pairs and without, and element-wise work that is never free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.recomputed import LEVELS
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem
from support.sweeps import halved

REPEATED = [
    ("deepseek-v3", PlanAxes(1, 1, 4, 2, 16, 16, 1, 1, 8, "dualpipev", overlap=True, alltoall="hierarchical")),
    ("qwen3-30b-a3b", PlanAxes(1, 1, 4, 1, 8, 8, 1, 1, 8, "1f1b_overlap", overlap=True)),
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), REPEATED)
@pytest.mark.parametrize("level", halved(["act", "medium", "full", "layer"]))
def test_plans_without_pairs_repeat_the_nodes_of_cells(name: str, axes: PlanAxes, level: str) -> None:
    """One rule for both: what the graphs of stages mark. A stage repeats no `post` behind its last layer.

    Without pairs launches of all that is repeated have one corner, so that it takes no longer. With no launches both
    take the same.
    """
    model = open_model(name).at(4096)
    for constants in ({"launch": 0.0, "expert_launch": 0.0}, {}):
        problem = PlanProblem(model, open_cluster("h100", axes.devices), axes.batch, constants)
        seconds = {}
        for overlap in (True, False):
            own = replace(axes, recompute=level, overlap=overlap)
            planned = PlannedStep(problem, own, open_choice(own.schedule), PartTable.of(problem, [own.split]))
            seconds[overlap] = StageColumns.of_plans([planned]).recompute_seconds[0, 0]
            if overlap:
                costs = planned.table.cell_costs(0, splits_backward=False)
                nodes = [repeated_by(shape, costs) for shape in planned.graphs[0]]
                post = dict(costs.segments)["post"].forward * (level == "layer")
                experts = planned.layout.counts[:, [WORK.index(PartKind.MOE), WORK.index(PartKind.MTP)]].any(axis=1)
        assert nodes == pytest.approx(seconds[True] - post * experts, rel=1e-12)
        assert (seconds[False] <= seconds[True] * (1 + 1e-12)).all()
        if constants:
            assert seconds[False] == pytest.approx(seconds[True], rel=1e-12)
        assert (seconds[False] > 0).all()


def repeated_by(shape: StageShape, costs: CellCosts) -> float:
    """Seconds that the nodes of a graph recompute for, ahead of their backwards and inside them."""
    ahead = sum(costs.duration(shape, Half.RECOMPUTE, index) for index in shape.recomputed)
    plain = StageShape(tuple(replace(node, inside=0.0, again=False) for node in shape.nodes), shape.outputs)
    inside = (
        costs.duration(shape, Half.BACKWARD, index) - costs.duration(plain, Half.BACKWARD, index)
        for index in range(len(shape))
    )
    return ahead + sum(inside)


def test_element_wise_work_of_a_level_moves_its_bytes() -> None:
    """Level `act` of a dense layer: norms and the activation, read and written once, over the bandwidth."""
    problem = PlanProblem(open_model("llama-3.1-8b").at(4096), open_cluster("h100", 64), 512)
    table = PartTable.of(problem, [RankSplit()])
    model, device = problem.model, problem.cluster.device
    bytes = model.seq * (2 * 4 * model.hidden + 6 * model.ffn)
    seconds = bytes / (device.hbm_Bps * problem.constant("hbm"))
    assert table.recompute_seconds[0, LEVELS.index("act"), WORK.index(PartKind.DENSE)] == pytest.approx(seconds)
