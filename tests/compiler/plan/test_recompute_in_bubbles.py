"""`recompute ... in bubbles`: where the compiler puts an R, what the step gains, and what the ranks then hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import schedc
from schedc.claims.size_range import sizes_in
from schedc.claims.sweep import sweep
from schedc.cli import main
from schedc.compiler import analyse, legal_schedule, price
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_family, open_input
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Plan
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.plan import Recompute, plan_of
from schedc.plan.counts.layers import held_share, moe_layer
from schedc.plan.place_recomputation import place_recomputations
from schedc.plan.writer import read_plan, write_plan
from schedc.source import Source
from schedc.step.costs.costs import Costs, parse_costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from support.paths import ROOT
from support.random_schedules import random_schedule
from support.sweeps import swept

EXAMPLE = ROOT / "examples" / "04_plan" / "recompute_bubbles.sched"
SIZED = "experts 8 top 2 width 128 hidden 256  tokens 64  topology nodes 1 x 2  parameters moe 0 MB"


def of_plan(tmp_path: Path, lines: str, schedule: str = "1f1b(P = 2, M = 4)", body: str = "") -> str:
    path = tmp_path / "a.sched"
    path.write_text(f"sched 1\n{body}\nplan a = {schedule} {{\n{lines}\n}}\n")
    return f"{path}:a"


# Where it is put.


def test_what_the_last_rank_has_to_do_is_all_that_is_left() -> None:
    P, M, F, B, R = 4, 8, 2.0, 4.0, 2.0  # two layers per stage
    analysis = analyse(f"{EXAMPLE}:bubbles", {})
    assert analysis.unplaced is not None
    assert analysis.unplaced.makespan == (M + P - 1) * (F + R + B)
    assert analysis.timeline.makespan == (P - 1) * (F + B) + M * (F + R + B)
    by_rank = [sum(op.kind is OpKind.R for op in analysis.schedule.ops(rank)) for rank in range(P)]
    assert by_rank == [M, M, M, 0]
    assert [claim.holds for claim in analysis.claims] == [True, True]  # claims are about the order without them


def test_the_example_by_hand_is_as_short() -> None:
    tree = open_family(f"{EXAMPLE}:recompute_1f1b")
    result = sweep(tree, list(sizes_in("P<=5, M<=8", tree, {})), Costs(), lambda done: None)
    assert (result.tried, result.failed) == (40, 0)
    assert [counts["proved"] for _, counts in result.claims] == [40, 40]
    by_hand = simulate(legal_schedule(tree, {}), Costs(F=2.0, I=2.0, W=2.0))
    assert by_hand.makespan == analyse(f"{EXAMPLE}:bubbles", {}).timeline.makespan


@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(st.integers(0, 10**6), st.sampled_from([1.0, 2.0, 0.25, 5.0]), st.sampled_from([0.0, 0.5]))
def test_no_step_gets_longer(seed: int, R: float, p2p: float) -> None:
    schedule = random_schedule(seed)
    stages = [(seed >> stage) % 3 > 0 for stage in range(schedule.stages)]
    again = tuple(R * chosen for chosen in stages)
    costs = Costs(F=2.0, I=3.0, W=1.0, R=R, p2p=p2p, recompute_in_backward=again)
    dependencies = Dependencies.of(schedule)
    placed = place_recomputations(dependencies, costs, stages)
    assert check_schedule(placed.schedule) == []
    without = simulate(schedule, costs, dependencies)
    assert simulate(placed.schedule, costs, placed).makespan <= without.makespan
    kept = placed.schedule.kind != OpKind.R
    for name in ("kind", "stage", "microbatch", "phase", "span"):
        assert (getattr(placed.schedule, name)[kept] == getattr(schedule, name)).all()
    assert (placed.schedule.pair[kept] >= 0).tolist() == (schedule.pair >= 0).tolist()
    _directly_before_backwards(placed, stages)


def _directly_before_backwards(dependencies: Dependencies, stages: list[bool]) -> None:
    schedule = dependencies.schedule
    for row in np.flatnonzero(schedule.kind == OpKind.R).tolist():
        follows = int(dependencies.cell_of[row]) + 1
        of = max(int(dependencies.first[follows]), int(dependencies.second[follows]))
        assert BACKWARD[schedule.kind[of]]
        assert stages[schedule.stage[row]]
        assert (schedule.stage[of], schedule.microbatch[of]) == (schedule.stage[row], schedule.microbatch[row])


def test_a_backward_works_out_inside_what_no_op_has() -> None:
    schedule = schedc.compiler.legal_schedule(open_input("1f1b"), {"P": 1, "M": 2})
    plain, again = simulate(schedule, Costs()), simulate(schedule, Costs(recompute_in_backward=(0.5,)))
    assert again.makespan == plain.makespan + 2 * 0.5
    with_r = _before(schedule, row=1)
    assert simulate(with_r, Costs(R=0.0, recompute_in_backward=(0.5,))).makespan == plain.makespan + 0.5
    assert recomputed_ops(with_r).sum() == 3


def _before(schedule: Schedule, row: int) -> Schedule:
    from schedc.plan.place_recomputation import _with_recomputation  # the one place where an R is put into an order

    dependencies = Dependencies.of(schedule)
    return _with_recomputation(dependencies, np.array([dependencies.cell_of[row]], np.int64))


# What is written and reported.


def test_it_travels_in_the_plan_and_the_rs_in_the_program() -> None:
    program = schedc.compile(f"{EXAMPLE}:bubbles")
    assert int((program.kind == OpKind.R).sum()) == 24
    plan = plan_of(program)
    assert plan.recompute == (Recompute(Level.FULL, bubbles=True),) * 4
    assert read_plan(write_plan(plan), 4) == plan


def test_stages_and_chunks_can_be_chosen(tmp_path: Path) -> None:
    path = of_plan(tmp_path, "layers 4  recompute stage [1] full in bubbles  recompute stage 0 light",
                   "1f1b(P = 4, M = 8)")  # fmt: skip
    step = price(open_input(path), {})
    schedule, costs = step.schedule, step.costs
    assert set(schedule.stage[schedule.kind == OpKind.R].tolist()) == {1}
    assert costs.resolved(4).recompute_in_backward.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_check_tells_what_it_gained() -> None:
    facts = json.loads(CliRunner().invoke(main, ["check", f"{EXAMPLE}:bubbles", "--json"]).stdout)
    found = facts["recomputation"]
    assert (found["placed"], found["makespan_without"], facts["makespan"]) == (24, 88.0, 82.0)
    assert found["busy"] == [16.0, 16.0, 16.0, 0.0]
    assert facts["plan"]["recompute"][0]["in_bubbles"] is True
    text = CliRunner().invoke(main, ["check", f"{EXAMPLE}:bubbles"]).output
    assert "recompute in bubbles: 24 R placed; makespan 88 without them" in text
    assert "recompute full in bubbles on stages 0-3" in text


def test_check_tells_of_a_plan_without_a_bubble_to_fill(tmp_path: Path) -> None:
    path = of_plan(tmp_path, "layers 2 recompute full in bubbles", "1f1b(P = 1, M = 3)")
    text = CliRunner().invoke(main, ["check", path]).output
    assert "recompute in bubbles: 0 R placed; makespan 24 without them" in text


OWN = """schedule own(P: ranks = 2, M: microbatches = 4) {
  place linear
  rank r { let w = P - 1 - r  repeat w { F }  repeat M - w { F R B }  repeat w { R B } }
}"""


def test_level_none_where_the_schedule_recomputes(tmp_path: Path) -> None:
    lines = "layers 4\nrecompute full\nrecompute stage 1 none"
    with pytest.raises(DiagnosticError) as caught:
        analyse(of_plan(tmp_path, lines, "own(P = 2, M = 4)", OWN), {})
    (found,) = caught.value.diagnostics
    assert found.code == "S149"
    assert found.primary.span.line == 9
    assert "stage 1 recomputes nothing" in found.message
    assert "1R0" in found.notes[0]
    analyse(of_plan(tmp_path, "layers 4 recompute full", "own(P = 2, M = 4)", OWN), {})


# What is held.


@pytest.mark.parametrize("level", ["", "recompute light", "recompute full in bubbles"])
def test_a_level_holds_its_share_until_the_r(tmp_path: Path, level: str) -> None:
    """Two MoE layers per stage; where the plan says nothing, an R of a stage with experts does all of `full`."""
    body, schedule = (OWN, "own(P = 2, M = 4)") if "bubbles" not in level else ("", "1f1b(P = 2, M = 4)")
    path = of_plan(tmp_path, f"layers 4  {SIZED}  {level}  memory 1 GB", schedule, body)
    step = price(open_input(path), {})
    order, costs = step.schedule, step.costs
    experts = plan_of(order).experts
    assert experts is not None
    layer = moe_layer(Plan(dtype="bf16"), experts)
    whole = 2 * 64 * layer.held()
    said = Level.FULL if not level else Level(level.split()[1])
    share = held_share(replace(layer, arriving=2.0), said)
    of_stage = costs.resolved(2)
    assert of_stage.restored.tolist() == pytest.approx([whole] * 2)
    assert of_stage.recomputed.tolist() == pytest.approx([whole * share] * 2, rel=0.05)
    assert of_stage.activation.tolist() == pytest.approx([whole * share if level else whole] * 2, rel=0.05)
    # of rank 0: two microbatches in flight, of one of which the R has run
    peak = measure_memory(order, costs).peak_memory
    assert peak[0] == pytest.approx(of_stage.recomputed[0] + whole)
    used = peak.max() / 1e6
    refused = of_plan(tmp_path, f"layers 4  {SIZED}  {level}  memory {used * 0.99:.6f} MB", schedule, body)
    with pytest.raises(DiagnosticError) as caught:
        analyse(refused, {})
    (found,) = caught.value.diagnostics
    assert found.code == "S406"
    assert f"{used:.3g}"[:3] in found.message.replace(" ", "")
    analyse(of_plan(tmp_path, f"layers 4  {SIZED}  {level}  memory {used * 1.01:.6f} MB", schedule, body), {})


def test_an_r_of_an_adaptive_stage_leaves_all_the_rows_that_can_come(tmp_path: Path) -> None:
    path = of_plan(tmp_path, f"layers 4  {SIZED}  recompute full adaptive(1.5)  memory 1 GB", "own(P = 2, M = 4)", OWN)
    step = price(open_input(path), {})
    order, costs = step.schedule, step.costs
    of_stage = costs.resolved(2)
    # Where it waits for its W, the gradients of the outputs of 2 x 2 rows a token wait too.
    experts = plan_of(order).experts
    assert experts is not None
    gradients = 2 * 64 * moe_layer(Plan(dtype="bf16"), experts).of_rows(2 * 2)
    assert (of_stage.pending_weight - of_stage.restored).tolist() == pytest.approx([gradients] * 2)
    assert (of_stage.restored > of_stage.activation).all()


# Inside of cells.

CELLS = """schema = "schedc.costs/1"
[cell]
stages = "%s"
attention = {F = 4.0, I = 4.0, W = 4.0}
dense = {F = 3.0, I = 3.0, W = 3.0}
experts = {F = 6.0, I = 6.0, W = 6.0}
shared = {F = 2.0, I = 2.0, W = 2.0}
dispatch = {rail = 5.0}
combine = {rail = 5.0}
"""
_FIRST = 4 / 6
"""Share of experts that is recomputed: two of three products."""


@pytest.mark.parametrize(
    ("blocks", "lines", "schedule", "expected"),
    [
        ("dense*2", "", "own(P = 2, M = 4)", {"R": 6.0, "B": 12.0}),  # an R does all of it
        ("moe", "", "own(P = 2, M = 4)", {"R": (6 + 2) * _FIRST, "B": 24.0}),  # what `full` lets go of
        ("moe", "recompute full", "own(P = 2, M = 4)", {"R": (6 + 2) * _FIRST, "B": 24.0}),
        ("moe", "recompute full", "1f1b(P = 2, M = 4)", {"B": 24 + (6 + 2) * _FIRST}),
        ("moe", "recompute full adaptive(2.0)", "1f1b(P = 2, M = 4)", {"B": 24.0}),  # nothing at the mean
    ],
)
def test_cells_are_priced_with_what_they_do_again(
    tmp_path: Path, blocks: str, lines: str, schedule: str, expected: dict[str, float]
) -> None:
    costs = parse_costs(Source("costs.toml", CELLS % blocks))
    layers = "layers 4" if "dense" in blocks else f"layers 2  {SIZED}"
    path = of_plan(tmp_path, f"{layers}  {lines}", schedule, OWN if "own" in schedule else "")
    inside = analyse(path, {}, costs).inside
    assert inside is not None
    compute = {kind.kind: kind.prediction.compute for kind in inside.kinds if kind.kind != "F"}
    assert compute == pytest.approx(expected)
    sent = {kind.kind: kind.prediction.communication for kind in inside.kinds}
    assert (sent.get("R", 0.0) == 5.0) == ("moe" in blocks and "own" in schedule)


FORWARD = 4 + 5 + 6 + 2 + 5
"""Time of the forward of a MoE layer of `CELLS`, one node after the other."""
LIGHT = 2 * 8 / (8 * 256 + 2 * 8 + 6 * 2 * 128)
"""Share of the router in the FLOPs of a forward: over those of attention, router and two experts, per column."""


@pytest.mark.parametrize(
    ("lines", "given", "expected"),
    [
        (f"layers 2  {SIZED}  recompute full in bubbles", None, (5 + (6 + 2) * _FIRST) / FORWARD),
        (f"layers 4  {SIZED}  recompute medium in bubbles", None, 2 * (6 + 2) * _FIRST / FORWARD),
        (f"layers 2  {SIZED}  recompute light in bubbles", None, LIGHT),  # no step of a cell: by FLOPs
        ("layers 2  experts 8 top 2  recompute light in bubbles", None, 1.0),  # whose sizes are not known
        (f"layers 2  {SIZED}  recompute full in bubbles", 0.75, 0.75),
        ("layers 2", None, 1.0),  # no Rs: the default
    ],
)
def test_an_r_takes_its_part_of_the_forward_where_cells_are_known(
    tmp_path: Path, lines: str, given: float | None, expected: float
) -> None:
    costs = replace(parse_costs(Source("costs.toml", CELLS % "moe")), R=given)
    step = price(open_input(of_plan(tmp_path, lines)), {}, costs)
    priced_at = step.costs
    of_stages = priced_at.resolved(2)
    assert of_stages.R.tolist() == pytest.approx([expected] * 2)
    assert of_stages.recompute_in_backward.tolist() == pytest.approx([expected * ("bubbles" in lines)] * 2)
