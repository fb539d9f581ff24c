"""Times of parts: what stages of a layout take, what levels recompute, how layers are balanced, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import Analysis, analyse
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.ops import OpKind
from schedc.plan import plan_of
from schedc.plan.counts.layers import layer_of_kind, time_share
from schedc.plan.layout.parser import parse_layout
from schedc.plan.layout.parts import PartKind
from schedc.plan.writer import write_plan
from schedc.source import Source
from schedc.step.costs.costs import Costs, parse_costs
from schedc.step.costs.parts import PartCosts
from support.plan_cases import written

GOOD = 'schema = "schedc.costs/1"\n'
TABLE = """
[parts]
embedding = {F = 0.1, W = 0.2}
dense = {F = 1, I = 1.1, W = 0.9}
moe = {F = 1.4, I = 1.5, W = 1.2}
mtp = {F = 2, I = 2.1, W = 2.2}
head = {F = 0.9, I = 0.8, W = 0.7}
op = {F = 0.02, I = 0.01, W = 0.03}
"""
LAYERS = 'layout "Et*3|tt|m|L" dense 2'
SIZED = "experts 8 top 2 width 512 hidden 1024  tokens 1024  block hidden 1024 heads 8 inner 2048"
ZB = "zbh1(P = 4, M = 8)"


def read(text: str) -> Costs:
    return parse_costs(Source("c.toml", GOOD + text))


def analysed(folder: Path, lines: str, head: str = ZB, text: str = TABLE) -> Analysis:
    return analyse(written(folder, lines, head), {}, read(text))


def refused(folder: Path, lines: str, text: str = TABLE) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        analysed(folder, lines, text=text)
    (finding,) = caught.value.diagnostics
    return finding


def test_a_stage_takes_the_sum_over_its_parts_and_what_every_op_takes(tmp_path: Path) -> None:
    costs = analysed(tmp_path, LAYERS).costs.resolved(4)
    F = [0.02 + 0.1 + 2 * 1 + 1.4, 0.02 + 2 * 1.4, 0.02 + 2, 0.02 + 0.9]
    I = [0.01 + 2 * 1.1 + 1.5, 0.01 + 2 * 1.5, 0.01 + 2.1, 0.01 + 0.8]  # noqa: E741
    W = [0.03 + 0.2 + 2 * 0.9 + 1.2, 0.03 + 2 * 1.2, 0.03 + 2.2, 0.03 + 0.7]
    assert np.allclose([costs.F, costs.I, costs.W], [F, I, W], rtol=1e-15, atol=0)
    assert np.array_equal(costs.B, costs.I + costs.W)
    assert np.array_equal(costs.R, costs.F)


def test_paddings_and_parts_that_are_left_out_take_no_time(tmp_path: Path) -> None:
    lines, text = 'layout "Et|noop,t|t,noop|tL"', "[parts]\ndense = {F = 2, W = 1}\n"
    costs = analysed(tmp_path, lines, text=text).costs.resolved(4)
    assert np.array_equal([costs.F, costs.I, costs.W], [[2] * 4, [0] * 4, [1] * 4])


@pytest.mark.parametrize("head", ["1f1b(P = 4, M = 8)", ZB, "dualpipev(P = 2, M = 8)", "adaptive_pipe(P = 2, M = 4)"])
def test_the_step_is_that_of_the_same_times_in_lists(tmp_path: Path, head: str) -> None:
    result = analysed(tmp_path, LAYERS, head)
    lists = replace(Costs(), **{op: tuple(getattr(result.costs, op)) for op in ("F", "I", "W")}, p2p=0.25)
    plan = written(tmp_path, LAYERS, head)
    assert analyse(plan, {}, lists).timeline.makespan == analyse(plan, {}, with_p2p(0.25)).timeline.makespan
    assert result.timeline.makespan == analyse(plan, {}, replace(lists, p2p=0.0)).timeline.makespan


def with_p2p(time: float) -> Costs:
    return Costs.from_options([f"p2p={time}"], read(TABLE))


@pytest.mark.slow
def test_times_equal_to_those_of_a_layer_give_its_step(tmp_path: Path) -> None:
    """One layer of time 1 takes F; the line `costs` says how many times as long the others take."""
    weights = {"dense": 1.0, "moe": 1.5, "mtp": 2.5, "head": 0.5, "embedding": 0.25}
    ops = {"F": 2.0, "I": 3.0, "W": 1.0}
    table = "".join(
        f"{kind} = {{{', '.join(f'{op} = {time * weight}' for op, time in ops.items())}}}\n"
        for kind, weight in weights.items()
    )
    line = "costs " + " ".join(f"{kind} {weight}" for kind, weight in weights.items())
    for more in ("", f"{SIZED}  recompute full", f"{SIZED}  recompute auto  memory 12 GB", "loss early", "loss again"):
        lines = f"layers 13 dense 5 mtp 1 at auto  {more}"
        of_parts = analysed(tmp_path, lines, text="[parts]\n" + table)
        of_layers = analyse(written(tmp_path, f"{lines}  {line}", ZB), {}, Costs(F=2.0, I=3.0, W=1.0))
        assert of_parts.schedule.layout == of_layers.schedule.layout, more
        if "recompute" not in more:  # with it a prediction's level counts its layer alone
            assert of_parts.timeline.makespan == pytest.approx(of_layers.timeline.makespan, rel=1e-14), more


@pytest.mark.parametrize("level", ["light", "medium", "full", "layer"])
def test_a_level_has_its_share_of_the_forward_of_its_layers(tmp_path: Path, level: str) -> None:
    result = analysed(tmp_path, f"{LAYERS}  {SIZED}  recompute {level}")
    plan, parts = plan_of(result.schedule), read(TABLE).parts
    assert parts is not None
    kind = plan.recompute_of(0).level
    dense, moe = (time_share(layer_of_kind(plan, of), kind) for of in (PartKind.DENSE, PartKind.MOE))
    expected = [2 * dense * parts.dense.F + moe * parts.moe.F, 2 * moe * parts.moe.F, moe * parts.moe.F, 0]
    assert np.allclose(result.costs.resolved(4).recompute_in_backward, expected, rtol=1e-14, atol=0)
    assert moe > 0


def test_a_level_takes_the_time_that_its_part_says(tmp_path: Path) -> None:
    """Where a table says nothing of a level, shares by FLOPs stay. `recompute auto` counts the same times."""
    table = TABLE.replace("moe = {F = 1.4", "moe = {full = 3, act = 0.125, F = 1.4")
    lines = f"{LAYERS}  {SIZED}  recompute"
    full, plain, act = (
        analysed(tmp_path, f"{lines} {level}", text=text).costs.resolved(4).recompute_in_backward
        for level, text in (("full", table), ("full", TABLE), ("act", table))
    )
    assert np.array_equal(full[[1, 2]], [2 * 3, plain[2]])
    assert full[0] - 3 == pytest.approx(plain[0] - plain[1] / 2)
    assert np.array_equal(act, [0.125, 0.25, 0, 0])
    sized = f"layers 8 dense 0  {SIZED}  memory 0.14 GB  parameters moe 1 MB  recompute auto"
    slower = "[parts]\nmoe = {full = 9, layer = 9, F = 1.4, I = 1.5, W = 1.2}\n"
    head = "1f1b(P = 4, M = 8)"
    chosen = [analysed(tmp_path, sized, head, text).chosen for text in (slower, slower.replace("9", "0.01"))]
    levels = [write_plan(each.plan).partition("recompute")[2] for each in chosen if each is not None]
    assert ["full" in levels[0], "layer" in levels[0], "layer" in levels[1]] == [False, False, True]


def test_an_r_in_a_bubble_takes_the_share_of_its_level(tmp_path: Path) -> None:
    lines = f"{LAYERS}  {SIZED}  recompute full"
    inside, placed = analysed(tmp_path, lines), analysed(tmp_path, f"{lines} in bubbles")
    rows = np.flatnonzero(placed.schedule.kind == OpKind.R)
    assert rows.size
    stages = sorted(set(placed.schedule.stage[rows].tolist()))
    expected = inside.costs.resolved(4).recompute_in_backward[stages]
    assert np.array_equal(placed.costs.resolved(4).R[stages], expected)
    assert placed.timeline.makespan < inside.timeline.makespan


def test_levels_are_chosen_by_the_forward_of_parts(tmp_path: Path) -> None:
    """`recompute auto` says the step that `check` gives the plan with the levels that it chose."""
    lines = f"layers 8 dense 0  {SIZED}  memory 0.14 GB  parameters moe 1 MB"
    head, table = "1f1b(P = 4, M = 8)", "[parts]\nmoe = {F = 1.4, I = 1.5, W = 1.2}\nop = {F = 0.02}\n"
    chosen = analysed(tmp_path, f"{lines}  recompute auto", head, table).chosen
    assert chosen is not None
    assert chosen.uncapped < chosen.makespan
    assert chosen.bound <= chosen.makespan
    _, word, levels = write_plan(chosen.plan).partition("recompute")
    assert analysed(tmp_path, f"{lines}  {word}{levels}", head, table).timeline.makespan == chosen.makespan


@pytest.mark.parametrize(("form", "F", "I", "W"), [("early", 2.4, 0, 0), ("again", 0.9, 1.7, 1.6)])
def test_products_of_a_loss_in_chunks_take_the_times_of_the_head(
    tmp_path: Path,
    form: str,
    F: float,
    I: float,  # noqa: E741
    W: float,
) -> None:
    costs = analysed(tmp_path, f"{LAYERS}  loss {form}").costs.resolved(4)
    assert np.allclose([costs.F[3], costs.I[3], costs.W[3]], [0.02 + F, 0.01 + I, 0.03 + W], rtol=1e-15, atol=0)


def test_layers_are_balanced_by_all_ops_of_their_parts(tmp_path: Path) -> None:
    heavy = "[parts]\ndense = {F = 1}\nmoe = {F = 1, I = 0.5, W = 1.5}\nhead = {I = 2}\nembedding = {W = 1}\n"
    result = analysed(tmp_path, "layers 12 dense 4 at auto", text=heavy)
    layout = parse_layout(Source("layout", result.schedule.layout), dense=4)
    loads = layout.counts[:, :5] @ np.array([1, 1, 3, 0, 2])
    assert loads.max() == 9  # 31 in 4 stages; no sums of whole parts lie nearer
    assert analysed(tmp_path, "layers 12 dense 4 at auto").schedule.layout != result.schedule.layout


def test_the_line_costs_beside_the_table_is_refused_in_its_place(tmp_path: Path) -> None:
    finding = refused(tmp_path, "layers 8  costs dense 2")
    assert finding.position == ("S411", 2, 13)
    assert "[parts] of `c.toml`" in finding.message
    assert finding.help == "leave out the line `costs`, or the table"


def test_a_schedule_without_layers_is_refused() -> None:
    for name in ("1f1b", "adaptive_pipe"):  # a policy runs under costs before they are checked
        with pytest.raises(DiagnosticError) as caught:
            analyse(name, {"P": 2, "M": 4}, read(TABLE))
        (finding,) = caught.value.diagnostics
        assert finding.position == ("S411", 3, 1)
        assert "write a plan with `layers N`" in finding.help


def test_an_empty_table_takes_no_time(tmp_path: Path) -> None:
    result = analysed(tmp_path, LAYERS, text="[parts]\n[ops]\np2p = 1\n")
    assert read("[parts]\n").parts == PartCosts()
    nothing = analyse(written(tmp_path, LAYERS, ZB), {}, Costs(F=0.0, I=0.0, W=0.0, p2p=1.0))
    assert result.timeline.makespan == nothing.timeline.makespan > 0
