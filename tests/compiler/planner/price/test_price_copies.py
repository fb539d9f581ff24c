"""Plans under a record have the prices of their files, under each way to copy experts, and the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedc.cell.recorded_rows import RecordedRows, write_recording
from schedc.plan.counts.copy_times import copy_bytes, copy_time
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.copies import LINES, RECORD
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.price_copies import PAIRS_IN_TURN, PlanUnderRecord, price_under
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.search.under_record import problem_under
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.report.plan_timelines import costs_of_plan, priced_file
from support.sweeps import halved

LAYERS = 6
QWEN: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 2, "vpp": 1, "ep": 4, "dp": 4, "zero": 1, "microbatch": 1}
PLANS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "one node": ("qwen3-30b-a3b", "h100", 8, QWEN | {"microbatches": 4, "schedule": "1f1b"}),
    "split": ("qwen3-30b-a3b", "h100", 8, QWEN | {"microbatches": 4, "schedule": "zbh1", "alltoall": "hierarchical"}),
    "two nodes": ("qwen3-30b-a3b", "h100", 32, QWEN | {"ep": 16, "dp": 16, "microbatches": 3, "schedule": "1f1b"}),
    "pairs": (
        "mixtral-8x7b",
        "a100-80",
        8,
        QWEN | {"vpp": 2, "microbatches": 4, "schedule": "dualpipev", "overlap": True, "recompute": "act"},
    ),
    "tensor ranks": ("qwen3-30b-a3b", "h100", 16, QWEN | {"tp": 2, "microbatches": 4, "schedule": "1f1b"}),
}


def record(experts: int, top: int, skew: float = 0.6, layers: int = LAYERS) -> RecordedRows:
    """Two steps of four microbatches on two ranks, of other sizes than all of the plans."""
    generator = np.random.default_rng(1)
    share = np.arange(1, experts + 1) ** -skew
    drawn = [
        generator.multinomial(2048 * top, generator.permutation(share / share.sum()), (2, 4, 2)) for _ in range(layers)
    ]
    return RecordedRows.of_experts(RECORD, np.array(drawn, np.int32).swapaxes(0, 1))


def planned(name: str, **changed: Any) -> tuple[PlannedStep, RecordedRows]:
    model, cluster, devices, axes = PLANS[name]
    sizes = replace(open_model(model), layers=LAYERS).at(4096)
    assert sizes.moe is not None
    one = PlanAxes(**axes | changed)
    known = record(sizes.moe.experts, sizes.moe.top)
    problem = problem_under(PlanProblem(sizes, open_cluster(cluster, devices), one.batch), known, (1, one.ep))
    return PlannedStep(problem, one, open_choice(one.schedule), PartTable.of(problem, [one.split])), known


def under(name: str, **changed: Any) -> PlanUnderRecord:
    return price_under(*planned(name, **changed), {})


def files(folder: Path, plan: PricedPlan, line: str | None = None) -> Path:
    """The files of a plan, with another line of copies if one is given."""
    copies = plan.planned.copies
    assert copies is not None
    assert copies.record.by_expert is not None
    text = plan.plan_text
    if line is not None:
        lines = [each for each in text.splitlines() if each.strip() not in LINES.values() or not each.strip()]
        place = next(number for number, each in enumerate(lines) if each.startswith("  memory"))
        lines[place:] = [f"  {line}"] * bool(line) + ["  memory 900 GB", "}", ""]
        text = "\n".join(lines)
    (path := folder / "01.sched").write_text(text)
    costs_of_plan(path).write_text(plan.cost_text)
    write_recording(folder / RECORD, copies.record.by_expert)
    return path


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", halved(PLANS))
def test_files_have_the_price(tmp_path: Path, name: str) -> None:
    priced = under(name).priced
    assert priced is not None
    assert priced.ways is not None
    step = priced_file(files(tmp_path, priced))
    assert step.predicted.makespan == priced.makespan
    assert tuple(step.memory.peak_memory.tolist()) == priced.peaks
    assert priced.ways.chosen.makespan == min(each.makespan for each in priced.ways.candidates)
    for way in priced.ways.candidates:
        if not way.refused:
            step = priced_file(files(tmp_path, priced, LINES[way.name]))
            assert step.predicted.makespan == way.makespan, way.name
            assert (step.plan.hot, step.plan.balance) == (way.plan.hot, way.plan.balance)
    assert f"## Copies of experts: {priced.ways.chosen.name}" in priced.plan_text


def test_copies_travel_as_fast_as_rows_inside_a_node(tmp_path: Path) -> None:
    """Beside rows of one hop over nodes, too: a copy takes the seconds of its bytes on the links of a node."""
    step, known = planned("two nodes")
    priced = price_under(step, known, {}).priced
    assert priced is not None
    alone = priced.planned
    plan = priced_file(files(tmp_path, priced, "balance by step")).plan
    assert plan.experts is not None
    time = copy_time(plan, alone.table.cell_costs(alone.row, alone.choice.splits))
    assert time is not None
    near, ranks = 8, 16
    bytes = plan.tokens * plan.experts.top * plan.dispatch_row_bytes * (near - 1) / ranks
    assert time.forward == pytest.approx(float(alone.table.node[alone.row]) / bytes * copy_bytes(plan)[0], rel=1e-9)


def test_a_search_has_the_rows_of_the_best_copies_where_some_may_be() -> None:
    step, _ = planned("one node")
    problem = step.problem
    alone, best = dict(problem.recorded)[4], dict(problem.copied)[4]
    assert 1 <= best < 1.02 < 1.1 < alone
    runs = {
        name: TrainingRun(problem, replace(step.axes, **changed)).skew
        for name, changed in {"": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "ep": {"ep": 1}}.items()
    }
    assert runs == {"": best, "tp": alone, "cp": alone, "ep": 1.0}
    assert problem.even.copied == ()


def test_tensor_ranks_copy_nothing() -> None:
    priced = under("tensor ranks").priced
    assert priced is not None
    assert priced.ways is not None
    assert {each.name: each.refused for each in priced.ways.candidates} == {
        "none": "",
        **dict.fromkeys(("hot auto", "by step", "by microbatch"), "a pipeline with tensor ranks copies no experts"),
    }


def test_plans_without_exchanges_are_those_of_even_rows() -> None:
    step, known = planned("one node", ep=1)
    alone = price_under(step, known, {}).priced
    assert alone is not None
    even = replace(step, problem=step.problem.even, table=PartTable.of(step.problem.even, [step.axes.split]))
    assert (alone.plan_text, alone.cost_text) == (price_plan(even).plan_text, price_plan(even).cost_text)


def test_pairs_that_do_not_overlap_are_not_priced() -> None:
    in_turn = under("pairs", overlap=False)
    assert (in_turn.priced, in_turn.refused) == (None, PAIRS_IN_TURN)


def test_a_file_does_not_call_an_equal_pipeline_shorter() -> None:
    """Even rows: copies copy nothing, and take as long as none."""
    step, _ = planned("one node")
    assert step.problem.model.moe is not None
    even = np.full((1, LAYERS, 1, 4, step.problem.model.moe.experts), 256, np.int32)
    priced = price_under(step, RecordedRows.of_experts(RECORD, even), {}).priced
    assert priced is not None
    assert priced.ways is not None
    assert priced.ways.chosen.name == "none"
    assert "## Copies of experts: none, a pipeline as short as hot auto." in priced.plan_text


@pytest.mark.slow
def test_a_way_that_does_not_fit_is_left_out() -> None:
    """Copies need memory: with less of it, another way is the best, and with too little none is."""
    step, known = planned("one node")
    free = price_under(step, known, {}).priced
    assert free is not None
    assert free.ways is not None
    assert free.ways.chosen.name != "none"
    device = step.problem.cluster.device
    for share, expected in ((free.needed - 1.0, True), (free.peaks[0] / 2, False)):
        less = replace(device, usable=share / device.hbm_bytes)
        problem = replace(step.problem, cluster=replace(step.problem.cluster, device=less))
        other = price_under(replace(step, problem=problem), known, {})
        assert (other.priced is not None) == expected
        if other.priced is not None:
            assert other.priced.ways is not None
            refused = {each.name: each.refused for each in other.priced.ways.candidates}
            assert refused[free.ways.chosen.name].startswith("the fullest rank needs more than")
            assert other.priced.makespan > free.makespan
        else:
            assert other.refused.startswith("no way to copy experts can be: the fullest rank needs more than")
