"""Levels of single layers: the bits of none, what each layer holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import schedc
from schedc.ir.contradictions import contradictions
from schedc.ir.plan import BlockSizes, ExpertSizes, Level, Recompute
from schedc.plan import Plan
from schedc_runtime import Pipeline
from schedc_runtime.commands.toy_models import toy_plan
from schedc_runtime.errors import StageError
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.stage.stage import Stage
from support.recompute_cases import SHARED, TOKENS, WIDTH, moe, moe_stage, unequal
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import in_sweeps

pytestmark = pytest.mark.slow

MIXED = [
    Recompute.of_layers([(Level.FULL, 1), (Level.ACT, 1)]),
    Recompute.of_layers([(Level.NONE, 1), (Level.MEDIUM, 1), (Level.LAYER, 1)]),
]


def _held(plan: Recompute) -> list[int]:
    """Bytes that a microbatch holds for each of two MoE layers."""
    stage, x = moe_stage(plan), torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    stage.forward(0, (x,))
    saved, layers = held(stage, 0).saved, [0, 0]
    for name, size in saved.items():
        layers[int(name.partition(".")[0])] += size
    stage.backward(0, (x,))
    return layers


def test_each_layer_holds_what_its_level_leaves() -> None:
    """The segment behind the first layer's last exchange is one with the second layer's attention."""
    uniform = {level: _held(Recompute(level)) for level in (Level.NONE, Level.NORM, Level.ACT, Level.FULL, Level.LAYER)}
    for first, second in [(Level.LAYER, Level.ACT), (Level.NORM, Level.FULL), (Level.ACT, Level.NONE)]:
        mixed = _held(Recompute.of_layers([(first, 1), (second, 1)]))
        assert mixed == [uniform[first][0], uniform[second][1]], (first, second)


def test_cells_recompute_the_nodes_of_their_layers() -> None:
    shape = moe_stage(Recompute.of_layers([(Level.MEDIUM, 1), (Level.FULL, 1)])).shape
    names = [shape.nodes[at].name for at in shape.recomputed]
    first = ["0.shared", "0.experts"] if SHARED else ["0.experts"]
    assert names == [*first, "1.shared", "1.permute", "1.dispatch.node", "1.experts"]


@in_sweeps(
    "test_each_layer_holds_what_its_level_leaves",
    "runtime/recompute/test_recompute.py::test_every_level_gives_the_bits_of_none",
)
@pytest.mark.slow
def test_mixed_levels_give_the_bits_of_none() -> None:
    """A dense layer and two MoE layers on a stage, three MoE layers on the other; dropout; two steps."""
    results = []
    for plan in (Plan(), Plan(recompute=tuple(MIXED))):
        program = schedc.compile("1f1b", P=2, M=2)
        pipe = Pipeline(moe(0.2, 6), program, loss_fn=next_token_loss, in_process=True, plan=plan)
        torch.manual_seed(1)
        losses = [pipe.step(*tokens(2)) for _ in range(2)]
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        results.append({"losses": torch.stack(losses), **grads})
        pipe.close()
    assert len(results[0]) > 20
    assert unequal(results[1], results[0]) == []


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


def _noting(stage: Stage, saved: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stage add to ``saved`` the bytes that it holds before a backward."""
    backward = stage.backward

    def noted(*args: Any, **options: Any) -> Any:
        saved.append(sum(held(stage, 0).saved.values()))
        return backward(*args, **options)

    monkeypatch.setattr(stage, "backward", noted)


def test_dense_layers_of_a_stage_that_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of two holds its activation no longer; what is outside of layers holds everything."""
    program, saved, grads = schedc.compile("1f1b", P=1, M=1), list[int](), []
    plans = [Recompute.of_layers(runs) for runs in ([(Level.NONE, 1), (Level.ACT, 1)], [(Level.ACT, 2)])]
    for recompute in (Recompute(), *plans, Recompute(Level.ACT)):
        gpt = small_gpt()
        torch.manual_seed(0)
        gpt.blocks = nn.ModuleList([_Dense().double() for _ in range(2)])
        plan = Plan(recompute=(recompute,))
        pipe = Pipeline(gpt, program, loss_fn=next_token_loss, in_process=True, plan=plan)
        (stage,) = pipe._held()
        stage.set_recomputation(recompute, count=True)
        _noting(stage, saved, monkeypatch)
        pipe.step(*tokens(1))
        grads.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
        pipe.close()
    assert [unequal(each, grads[0]) for each in grads] == [[]] * 4
    none, one, both, everywhere = saved
    assert none - both == 2 * (none - one) > 0
    assert both - everywhere == 6 * (16 + 2) * 8  # the output, means and deviations of the last norm


def test_levels_of_more_layers_than_the_model_has() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    plan = Plan(recompute=(Recompute.of_layers([(Level.FULL, 5)]), Recompute()))
    with pytest.raises(StageError, match="stage 0: the plan has levels of 5 layers, and the model has 2 there"):
        Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True, plan=plan)


class _Unnamed(nn.Module):
    """A dense block whose MLP has no name that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inside(self.norm(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", [Recompute(Level.FULL), Recompute.of_layers([(Level.NONE, 1), (Level.FULL, 1)])])
def test_a_level_that_finds_no_mlp_is_refused(recompute: Recompute) -> None:
    """It would run nothing but the norm a second time, and the memory that `check` counts would be too small."""
    gpt = small_gpt(2)
    gpt.blocks[1] = _Unnamed().double()
    program = schedc.compile("1f1b", P=1, M=1)
    with pytest.raises(StageError, match=r"`recompute full` finds no MLP in `blocks\.1`(?s:.*)`feed_forward`"):
        Pipeline(gpt, program, loss_fn=next_token_loss, in_process=True, plan=Plan(recompute=(recompute,)))


def test_norms_that_are_not_there_are_not_recomputed() -> None:
    gpt = small_gpt(2)
    gpt.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).double()
    program = schedc.compile("1f1b", P=1, M=1)
    plan = Plan(recompute=(Recompute(Level.NORM),))
    with pytest.raises(StageError, match=r"`recompute norm` finds no norm in `blocks\.1`"):
        Pipeline(gpt, program, loss_fn=next_token_loss, in_process=True, plan=plan)


def test_toy_models_have_no_sizes_of_blocks() -> None:
    plan = toy_plan(Plan(experts=ExpertSizes(8, 2, width=4, hidden=16), block=BlockSizes(heads=2, inner=8)))
    assert list(contradictions(plan, 1)) == []
