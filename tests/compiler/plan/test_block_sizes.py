"""Sizes of attention and dense layers in a plan: what dense layers hold, the time of levels, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from schedc.compiler import analyse, compile
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import BlockSizes, ExpertSizes, Level, Plan
from schedc.model.counts import layer_flops, seen
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.plan import plan_of
from schedc.plan.counts.layers import counted_layer
from schedc.plan.writer import read_plan, write_plan
from schedc.planner.presets.library import open_model
from schedc.planner.price.plan_lines import model_lines
from schedc.report.check import to_json
from support.plan_cases import written

LLAMA = "layers 8 block hidden 8192 heads 64 keys 8 inner 28672 tokens 4096"
DSV3 = "block heads 128 head 128 rotary 64 query 1536 latent 512 inner 18432 sequence 4096"
EXPERTS = "experts 256 top 8 shared 1 width 2048 hidden 7168"


def test_a_dense_layer_holds_what_its_sizes_say(tmp_path: Path) -> None:
    """By hand: residual stream and query, result of attention, keys and values of 8 heads, norms, and the gated MLP."""
    held = {
        "none": 2 * (2 * 8192 + 2 * 8192 + 2 * 1024 + 2 * 8192 + 3 * 28672),
        "norm": 2 * (2 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28672),
        "act": 2 * (2 * 8192 + 2 * 8192 + 2 * 1024 + 2 * 28672),
        "full": 2 * (2 * 8192 + 2 * 8192 + 2 * 1024),
    }
    for level, per_token in held.items():
        result = analyse(written(tmp_path, f"{LLAMA} memory 999 GB recompute {level}"), {})
        assert result.costs.activation == pytest.approx([4 * 4096 * per_token] * 2)
        (row, _) = to_json(result)["plan"]["recompute"]
        assert row["bytes_saved"] == 4 * 4096 * (held["none"] - per_token)
        assert row["extra_flops"] == (4 * 4096 * 6 * 8192 * 28672 if level == "full" else 0)


def test_backwards_take_the_time_that_they_recompute_for(tmp_path: Path) -> None:
    """FLOPs of the MLP over those of the layer, in each of four layers of a stage."""
    products = 2 * 8192 * (8192 + 2 * 1024 + 8192)
    share = 6 * 8192 * 28672 / (products + 6 * 8192 * 28672)
    for levels, layers in (("full", 4), ("full 1 act 2", 1), ("norm", 0)):
        costs = analyse(written(tmp_path, f"{LLAMA} recompute {levels}"), {}).costs.resolved(2)
        assert costs.recompute_in_backward == pytest.approx([layers * share] * 2)
        assert pytest.approx([4.0] * 2) == costs.F
    adaptive = analyse(written(tmp_path, f"layers 8 {EXPERTS} recompute medium adaptive(2.0)"), {}).costs
    assert adaptive.resolved(2).recompute_in_backward.tolist() == [0.0, 0.0]


def test_a_moe_layer_by_the_sizes_of_its_attention(tmp_path: Path) -> None:
    """By hand: latent attention, 9 experts of a token, its rows, and the router."""
    attention = 2 * 7168 + 128 * (192 + 192 + 128 + 128) + 1536 + 512 + 64
    whole = 2 * (attention + 2 * 7168 + 1536 + 512 + 3 * 9 * 2048 + 8 * 7168) + 4 * 256
    result = analyse(written(tmp_path, f"layers 8 {EXPERTS} {DSV3} tokens 4096 memory 999 GB"), {})
    assert result.costs.activation == pytest.approx([4 * 4096 * whole] * 2)
    products = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    forward = 2 * products + 128 * 320 * 4096 + 2 * 7168 * 256 + 6 * 9 * 7168 * 2048
    medium = analyse(written(tmp_path, f"layers 8 {EXPERTS} {DSV3} recompute medium"), {}).costs.resolved(2)
    again = 4 * (2 * 7168 * 256 + 4 * 9 * 7168 * 2048) / forward
    assert medium.recompute_in_backward == pytest.approx([again] * 2)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "mixtral-8x7b", "deepseek-v3"])
def test_flops_of_a_layer_are_those_of_its_model(name: str) -> None:
    """The lines of a model say its windows, of some layers or of all: the mean over MoE layers is the model's own."""
    model = open_model(name).at(8192)
    lines = "  ".join(model_lines(model))
    counted = counted_layer(read_plan(lines, 1), True)
    assert counted is not None
    own = [sum(layer) for number in range(model.layers) if (layer := _moe_flops(model, number))]
    assert counted.flops == pytest.approx(sum(own) / len(own), rel=1e-12)


def _moe_flops(model: ModelSizes, number: int) -> list[float]:
    return [*layer_flops(model, number, model.seq).values()] if model.kind_of(number) is LayerKind.MOE else []


@pytest.mark.parametrize(
    ("said", "layers"), [("window 128", [128]), ("window 128 whole 2", [128, 0, 0]), ("window 64 windowed 3", [64] * 3)]
)
def test_a_window_leaves_scores_out(said: str, layers: list[int]) -> None:
    counted, whole = (
        counted_layer(read_plan(f"block hidden 64 heads 2 inner 96 sequence 512 {more}", 1), False)
        for more in (said, "")
    )
    assert counted is not None
    assert whole is not None
    scores = 2 * 2 * (32 + 32)
    less = sum(seen(512, 0, True) - seen(512, window, True) for window in layers) / len(layers)
    assert whole.flops - counted.flops == pytest.approx(scores * less)
    assert whole.held() == counted.held()


def test_programs_carry_the_sizes(tmp_path: Path) -> None:
    program = compile(written(tmp_path, f"{LLAMA} recompute full"))
    assert plan_of(program).block == BlockSizes(8192, heads=64, keys=8, inner=28672)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("block hidden 64 haeds 4", "S144", "`haeds` is no size of a block"),
        ("block hidden 64 hidden 64", "S144", "`hidden` is said twice"),
        ("block hidden 64 heads 0", "S146", "`heads` is no number of columns"),
        ("block hidden 64 inner 8 KB", "S146", "`inner` is no number of columns"),
        ("block heads 4", "S146", "without the columns of a token"),
        ("block hidden 64 heads 5", "S146", "5 heads of 64 columns"),
        ("block hidden 64 heads 4 keys 3", "S146", "4 heads over 3 heads of keys"),
        ("block hidden 64 matrices 4", "S146", "a dense MLP of 4 matrices"),
        ("block hidden 64 windowed 4", "S146", "layers with a window, and no tokens of a window"),
        ("block hidden 64 experts 8 top 2 hidden 32", "S146", "tokens of 64 columns in `block`, and of 32"),
        ("block hidden 64\n  block hidden 64", "S144", "`block` is said twice"),
        ("block inner 64 experts 8 top 2 width 8 hidden 32 memory 1 GB activations moe 1 MB", "S146", "a dense layer"),
    ],
)
def test_sizes_that_are_refused(tmp_path: Path, line: str, code: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"layers 8 {'dense 4' if 'experts' in line else ''} {line}"), {})
    (finding,) = caught.value.diagnostics
    assert (finding.code, message in finding.message) == (code, True), finding.message
    assert finding.help


def test_a_plan_says_what_attention_holds() -> None:
    """In place of 6 H numbers, of MoE and dense layers; `layer` holds the input alone, or less where a plan says so."""
    experts, block = ExpertSizes(8, 2, width=32, hidden=64), BlockSizes(64, inner=96)
    plain = Plan(experts=experts, block=block, tokens=4)
    said = replace(plain, attention=1000.0)
    for moe in (True, False):
        own, by_sizes, less = (counted_layer(plan, moe) for plan in (said, plain, replace(plain, attention=100.0)))
        assert own is not None
        assert by_sizes is not None
        assert less is not None
        assert own.held() - by_sizes.held() == 1000 - 6 * 64 * 2
        saved, full = (own.saving(level).bytes for level in (Level.LAYER, Level.FULL))
        assert saved - full == 1000 - 64 * 2
        assert less.saving(Level.LAYER).bytes == full
    assert read_plan(write_plan(said), 1) == said
