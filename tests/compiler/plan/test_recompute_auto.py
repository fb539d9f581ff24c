"""`recompute auto`: the best of all levels at small sizes, a bound that holds, the caps of the example, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations_with_replacement, groupby, product
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import Analysis, analyse, compile
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.plan import Level, Recompute
from schedc.plan import plan_of
from schedc.plan.choose_levels import LevelSearch
from schedc.plan.passes import Step, lower
from schedc.plan.writer import write_plan
from schedc.report.check import to_json, to_text
from schedc.step.costs.costs import Costs
from schedc.step.timeline import run_times
from support.paths import ROOT
from support.plan_cases import written
from support.sweeps import halved

MOE = "experts 64 top 8 shared 1 width 1408 hidden 2048 tokens 4096"
EXAMPLE = (ROOT / "examples" / "auto.sched").read_text(encoding="utf-8")
FULLEST = 119.487
"""GB that the first rank of the example holds without recomputation."""


def _chosen(folder: Path, lines: str, head: str, costs: Costs | None = None) -> Analysis:
    result = analyse(written(folder, lines, head), {}, costs)
    assert result.chosen is not None
    assert result.timeline.makespan == pytest.approx(result.chosen.makespan)
    assert result.chosen.bound <= result.chosen.makespan
    assert max(result.chosen.held) <= result.chosen.limit * (1 + 1e-9)
    return result


def _small(folder: Path, lines: str, head: str) -> LevelSearch:
    """The search of a plan whose levels are all chosen."""
    step = lower(Step(open_input(written(folder, lines, head)), {}, Costs()), "layers", "plan")
    assert step.chosen is not None
    plan = replace(step.plan, recompute=(Recompute(),) * step.schedule.stages)
    return LevelSearch(replace(step, plan=plan), step.chosen.stages, step.chosen.limit)


def _mixes(layers: int) -> list[Recompute]:
    """Every count of levels of a stage, but norms alone, which take no product either."""
    levels = [level for level in sorted(Level, key=lambda level: -level.place) if level is not Level.NORM]
    counted = combinations_with_replacement(levels, layers)
    return [Recompute.of_layers([(level, len(list(run))) for level, run in groupby(mix)]) for mix in counted]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "layers", "cap"),
    halved(
        [
            ("1f1b(P = 2, M = 4)", 4, 0.55),
            ("interleaved_1f1b(P = 1, M = 3, v = 2)", 4, 0.7),
        ]
    ),
)
def test_no_levels_are_better_than_those_chosen(tmp_path: Path, head: str, layers: int, cap: float) -> None:
    """All levels of all layers, in backwards and in bubbles, against the choice and its bound."""
    lines = f"layers {layers} {MOE} parameters moe 0 MB recompute auto memory"
    fullest = analyse(written(tmp_path, f"{lines} 999 GB", head), {}).memory.peak_memory.max()
    search = _small(tmp_path, f"{lines} {fullest * cap / 1e9:.6f} GB", head)
    stages, steps = search.schedule.stages, []
    for mixes in product(_mixes(layers // stages), repeat=stages):
        step = search.inside_backwards(dict(enumerate(mixes)))
        if (step.held.peaks() <= search.limit).all():
            steps.append((search.makespan(step.held.of_stage.recompute_in_backward), mixes))
    best = min(steps, key=lambda step: step[0])[0]
    chosen = _chosen(tmp_path, f"{lines} {fullest * cap / 1e9:.6f} GB", head).chosen
    assert chosen is not None
    assert chosen.makespan <= best * (1 + 1e-5)
    assert chosen.bound <= best * (1 + 1e-9)
    assert chosen.uncapped <= chosen.bound * (1 + 1e-5)
    for _, mixes in sorted(steps, key=lambda step: step[0])[:6]:
        levels = {s: replace(mix, bubbles=mix.level is not Level.NONE) for s, mix in enumerate(mixes)}
        ends = run_times((step := search.outcome(levels)).dependencies, step.costs)[1]
        assert chosen.bound <= ends.max() * (1 + 1e-9)


@pytest.mark.parametrize(("share", "most", "single"), [(0.75, 1.04, 1.13), (0.6, 1.08, 1.13)])
def test_the_example_under_its_caps(tmp_path: Path, share: float, most: float, single: float) -> None:
    path = tmp_path / "auto.sched"
    path.write_text(EXAMPLE.replace("89.62 GB", f"{share * FULLEST + 0.01:.3f} GB"), encoding="utf-8")
    result = analyse(str(path), {})
    facts = json.loads(json.dumps(to_json(result)))
    assert 1 < facts["bound"] <= facts["makespan_over_uncapped"] <= most
    assert facts["recompute_auto"]["one_level"]["over_uncapped"] >= single
    assert facts["makespan_over_uncapped"] < facts["recompute_auto"]["level_per_stage"]
    assert facts["seconds"] > 0
    held = [rank["held"] for rank in facts["recompute_auto"]["ranks"]]
    assert max(held) <= facts["recompute_auto"]["limit"]
    assert held == pytest.approx(result.memory.peak_memory.tolist())
    text = to_text(facts, False)
    assert "recompute auto, rank 0: full " in text
    assert f"no levels go below {facts['bound']:.4f}" in text


def test_the_choice_is_what_programs_carry(tmp_path: Path) -> None:
    """A plan with the levels that were chosen, written by hand, gives the same step and the same program."""
    lines = f"layers 9 dense 1 {MOE} block inner 8192 memory 6 GB parameters moe 0 MB dense 0 MB"
    path = written(tmp_path, f"{lines} recompute auto", "dualpipev(P = 2, M = 8)")
    program, result = compile(path), analyse(path, {})
    assert result.chosen is not None
    assert plan_of(program).recompute == result.chosen.plan.recompute
    by_hand = "".join(write_plan(program.plan).partition("recompute")[1:])
    assert "auto" not in by_hand
    again = written(tmp_path, f"{lines} {by_hand}", "dualpipev(P = 2, M = 8)")
    assert analyse(again, {}).timeline.makespan == pytest.approx(result.timeline.makespan)
    assert compile(again) == replace(program, source=compile(again).source)


def test_lines_for_stages_stand_beside_auto(tmp_path: Path) -> None:
    lines = f"layers 8 {MOE} parameters moe 0 MB memory 9 GB recompute auto\n  recompute stage 1 medium"
    result = _chosen(tmp_path, lines, "1f1b(P = 4, M = 8)")
    assert result.chosen is not None
    assert result.chosen.stages == (0, 2, 3)
    assert plan_of(result.schedule).recompute[1] == Recompute(
        Level.MEDIUM, None, plan_of(result.schedule).recompute[1].by
    )


def test_a_memory_without_unit(tmp_path: Path) -> None:
    """Layers of activation 1; a cap of three of the four microbatches of the first rank."""
    result = _chosen(tmp_path, f"layers 8 {MOE} recompute auto memory 6", "1f1b(P = 4, M = 8)")
    assert np.max(result.memory.peak_memory) <= 6
    assert plan_of(result.schedule).recompute[3] == Recompute()


def test_enough_memory_recomputes_nothing(tmp_path: Path) -> None:
    result = _chosen(tmp_path, f"layers 8 {MOE} memory 999 GB recompute auto", "zbv(P = 2, M = 4)")
    facts = to_json(result)
    assert (facts["makespan_over_uncapped"], facts["bound"]) == (1.0, 1.0)
    assert all(level.level is Level.NONE for level in plan_of(result.schedule).recompute)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("recompute auto", "`recompute auto` without a memory"),
        ("recompute auto in bubbles  memory 99 GB", "`auto` and something else"),
        ("recompute auto 3  memory 99 GB", "`auto` and something else"),
        ("recompute auto  recompute auto  memory 99 GB", "two lines for the same stages"),
        ("recompute auto  memory 100 MB parameters moe 0 MB", "rank 0 holds "),
    ],
)
def test_what_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"layers 8 {MOE} {lines}"), {})
    (finding,) = caught.value.diagnostics
    assert message in finding.message, finding.message
    assert finding.help


def test_a_cap_that_no_levels_reach_says_the_least_that_would_do(tmp_path: Path) -> None:
    lines = f"layers 8 {MOE} parameters moe 0 MB recompute auto memory"
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"{lines} 100 MB"), {})
    (finding,) = caught.value.diagnostics
    assert finding.code == "S406"
    assert finding.notes[-1] == "`recompute auto` has no levels that hold less"
    least = float(finding.help.removeprefix("allow ").partition(" MB")[0])
    _chosen(tmp_path, f"{lines} {least} MB", "1f1b(P = 2, M = 4)")
    with pytest.raises(DiagnosticError, match="S406"):
        analyse(written(tmp_path, f"{lines} {least - 0.5:.4f} MB"), {})
