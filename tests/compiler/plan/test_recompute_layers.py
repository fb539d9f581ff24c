"""Levels of single layers in a plan: memory and costs, printed and kept facts, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.compiler import analyse, compile
from schedc.diagnostics import DiagnosticError
from schedc.ir.contradictions import contradictions
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.plan import By, ExpertSizes, Level, Plan, Recompute
from schedc.plan import plan_of
from schedc.plan.counts.layers import held_share, moe_layer
from schedc.plan.writer import write_plan
from schedc.report.check import to_json, to_text
from support.plan_cases import written

SIZES = ExpertSizes(64, 8, shared=1, width=1408, hidden=2048)
LAYER = moe_layer(Plan(), SIZES)
LINES = "layers 9 dense 1 experts 64 top 8 shared 1 width 1408 hidden 2048 tokens 4096"
BYTES = "activations dense 300 MB memory"
RUNS = Recompute.of_layers([(Level.ACT, 1), (Level.FULL, 2), (Level.NONE, 1), (Level.MEDIUM, 1)])


def test_levels_of_layers_hold_what_each_leaves(tmp_path: Path) -> None:
    """Stage 0 has a dense layer, whose activations no level reduces, and four MoE layers."""
    path = written(tmp_path, f"{LINES}\n  recompute stage 0 act 1 full 2 none 1 medium 1\n  {BYTES} 99 GB")
    result = analyse(path, {})
    assert plan_of(result.schedule).recompute == (RUNS, Recompute())
    layer = 4096 * LAYER.held()
    shares = [held_share(LAYER, level) for level in (Level.FULL, Level.FULL, Level.NONE, Level.MEDIUM)]
    assert result.costs.resolved(2).activation == pytest.approx([300e6 + sum(shares) * layer, 4 * layer])
    (first, _) = to_json(result)["plan"]["recompute"]
    assert first["layers"] == ["act", "full", "full", "none", "medium"]
    levels = [LAYER.saving(level) for level in (Level.FULL, Level.FULL, Level.MEDIUM)]
    assert first["bytes_saved"] == pytest.approx(4096 * sum(level.bytes for level in levels))
    assert first["extra_flops"] == 4096 * sum(level.flops for level in levels)
    assert "recompute act 1, full 2, none 1, medium 1 on stage 0: saves" in to_text(to_json(result), False)


def test_the_cap_counts_levels_of_layers(tmp_path: Path) -> None:
    lines = f"{LINES}\n  recompute stage 0 none 1 full 2 act 1\n  {BYTES}"
    held = analyse(written(tmp_path, f"{lines} 99 GB"), {}).memory.peak_memory.max() / 1e9
    analyse(written(tmp_path, f"{lines} {held + 0.01:.3f} GB"), {})
    with pytest.raises(DiagnosticError, match=f"rank . holds {held:.4g}"):
        analyse(written(tmp_path, f"{lines} {held - 0.01:.3f} GB"), {})


def test_programs_carry_levels_of_layers(tmp_path: Path) -> None:
    program = compile(written(tmp_path, f"{LINES}\n  recompute chunk 0 full 2 act 1 in bubbles"))
    assert "recompute all full 2 act 1 in bubbles" in write_plan(program.plan)
    levels = Recompute.of_layers([(Level.FULL, 2), (Level.ACT, 1)], bubbles=True)
    assert plan_of(program).recompute == (levels, levels)
    assert program_from_json(program_to_json(program)) == program


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stage 0 full 3 act 4", "levels of 7 layers, and stage 0 has 5"),
        ("full 5", "levels of 5 layers, and stage 1 has 4"),
        ("stage 0 light 1 full 3", "`light` of layer 0 of stage 0, which is dense"),
        ("stage 1 full 3 act", "levels of layers, and something else"),
        ("stage 1 full 3 adaptive(2.0)", "levels of layers, and something else"),
        ("stage 1 full 0", "`full` of 0 layers"),
        ("stage 1 ful 2", "`ful` is no level of recomputation"),
        ("stage 1 full 2 in cells", "`cells` is no place to recompute"),
        ("stage 1 full 2\n  recompute stage 1 act 1", "two lines for the same stage"),
        ("stage 7 full 2", "there is no stage 7"),
    ],
)
def test_levels_of_layers_that_are_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"{LINES}\n  recompute {line}"), {})
    (finding,) = caught.value.diagnostics
    assert message in finding.message
    assert finding.help
    assert finding.position[1] >= 3


def test_levels_of_layers_made_in_python() -> None:
    wrong = [
        Recompute(Level.ACT, layers=RUNS.layers),
        Recompute(RUNS.level, 2.0, By.GROUP, layers=RUNS.layers),
        Recompute.of_layers([(Level.FULL, 1), (Level.NONE, 0)]),
    ]
    assert [found.index for found in contradictions(Plan(recompute=(RUNS, *wrong)), None)] == [1, 2, 3]
