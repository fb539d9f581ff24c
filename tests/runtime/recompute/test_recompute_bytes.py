"""Recomputation: bytes and FLOPs of every level, as counted and in closed form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from schedc.ir.plan import BlockSizes, Level, Plan, Recompute
from schedc.plan.counts.layers import counted_layer, moe_layer
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.models.gpt import GptBlock, GPTConfig
from schedc_runtime.models.moe_transformer import MoeBlock, MoEConfig
from schedc_runtime.moe.router import RouterConfig
from support.recompute_cases import (
    EXPERTS,
    INNER,
    SHARED,
    SIZES,
    TOKENS,
    TOP,
    WIDTH,
    Block,
    block_stage,
    moe_stage,
)
from support.sweeps import halved

LEVELS = [level for level in Level if level is not Level.NONE]


def measured(plan: Recompute) -> tuple[float, int, int]:
    """Bytes that autograd has saved, and those the runtime holds, per token and layer; FLOPs of the backward."""
    stage, x = moe_stage(plan), torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    stage.forward(0, (x,))
    bytes_held = held(stage, 0)
    with FlopCounterMode(display=False) as flops:
        stage.backward(0, (x,))
    return sum(bytes_held.saved.values()) / TOKENS / 2, bytes_held.runtime // TOKENS, flops.get_total_flops()


STATISTICS = 2 * 2 * 4
"""Bytes per token and layer of two norms' means and deviations, which closed forms leave out."""
WEIGHTS = TOP * 8
"""And of the router's choice."""
GATES = TOP * 4 - 4 * (EXPERTS + 2) / TOKENS
"""And of the gates; less the counts of all: rows by expert, tokens, flags."""
BESIDE = {
    Level.NORM: STATISTICS, Level.ACT: STATISTICS, Level.LIGHT: STATISTICS + WEIGHTS,
    Level.MEDIUM: STATISTICS + WEIGHTS, Level.FULL: STATISTICS + WEIGHTS + GATES,
    Level.LAYER: STATISTICS + WEIGHTS + GATES,
}  # fmt: skip
QUERY_KEY_VALUE = 4 * WIDTH * 4
"""Bytes of what the attention of closed forms holds, and the linear layer in its place does not."""
THREE_LINEAR = 3 * 2 * WIDTH**2
"""FLOPs of the products beside the layer."""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("level", halved(LEVELS))
def test_bytes_and_flops_are_those_of_the_closed_forms(level: Level) -> None:
    none, kept_by_none, before = measured(Recompute())
    bytes_held, kept, after = measured(Recompute(level))
    expected = moe_layer(Plan(dtype="fp32"), SIZES).saving(level)
    beside, fewer = (QUERY_KEY_VALUE, THREE_LINEAR) if level is Level.LAYER else (0, 0)
    assert none - bytes_held == expected.bytes + BESIDE[level] - beside
    assert kept - kept_by_none <= 2 * TOP * 8  # the choice of both layers, where the router is recomputed
    assert (after - before) // TOKENS // 2 == expected.flops - fewer


class _Rows(nn.Module):
    """[tokens, width] as one sequence."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x[None])
        return output[0]


def _dense(block: nn.Module, level: Level) -> tuple[float, int]:
    """Bytes per token that autograd has saved of a dense block, and FLOPs of its backward."""
    stage, x = block_stage([_Rows(block)], TOKENS, WIDTH, Recompute(level)), torch.randn(TOKENS, WIDTH)
    stage.forward(0, (x,))
    saved = sum(held(stage, 0).saved.values()) / TOKENS
    with FlopCounterMode(display=False) as flops:
        stage.backward(0, (x,))
    return saved, flops.get_total_flops() // TOKENS


def test_dense_blocks_hold_what_the_closed_forms_say() -> None:
    """Attention of equal heads: what is held whole, but for 4 norms' figures and a logarithm per head."""
    config, sizes = GPTConfig(width=WIDTH, heads=2), BlockSizes(WIDTH, heads=2, inner=4 * WIDTH, matrices=2)
    layer = counted_layer(Plan(block=sizes, dtype="fp32"), False)
    assert layer is not None
    saved = {level: _dense(GptBlock(config), level)[0] for level in (Level.NONE, Level.NORM, Level.ACT, Level.LAYER)}
    beside = {Level.NONE: STATISTICS + 2 * 4, Level.NORM: 2 * 4, Level.ACT: 2 * 4, Level.LAYER: 0}
    assert saved == {level: layer.held(level) + more for level, more in beside.items()}


def test_dense_levels_save_and_cost_what_the_closed_forms_say() -> None:
    """A gated MLP behind attention from narrow vectors."""
    narrow = {"query_rank": 8, "key_value_rank": 4, "plain": 4, "rotary": 2, "value": 4}
    config = MoEConfig(width=WIDTH, heads=2, inner=24, routing=RouterConfig(4, 2), **narrow)
    sizes = BlockSizes(WIDTH, heads=2, head=4, query=8, latent=4, rotary=2, inner=24)
    layer = counted_layer(Plan(block=sizes, dtype="fp32"), False)
    assert layer is not None
    measured = {level: _dense(MoeBlock(config, dense=True), level) for level in (Level.NORM, Level.ACT, Level.FULL)}
    bytes_held = {level: layer.held(level) for level in measured}
    for low, high in ((Level.NORM, Level.ACT), (Level.ACT, Level.FULL)):
        assert measured[low][0] - measured[high][0] == bytes_held[low] - bytes_held[high]
    assert measured[Level.FULL][1] - measured[Level.ACT][1] == layer.saving(Level.FULL).flops


def test_the_output_of_a_stage_is_let_go_and_its_gradient_collected() -> None:
    block, x = Block(WIDTH, INNER, EXPERTS, TOP, SHARED), torch.randn(TOKENS, WIDTH)
    stage = block_stage([copy.deepcopy(block)], TOKENS, WIDTH, Recompute())
    (output,) = stage.forward(0, (x,))
    storage = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
    gradient = torch.randn_like(output)
    del output
    assert storage.expired()  # type: ignore[no-untyped-call]
    (of_input,) = stage.backward(0, (gradient,))
    again = x.clone().requires_grad_()
    block(again).backward(gradient)
    torch.testing.assert_close(of_input, again.grad)
