"""Memory inside of ops: the bytes that are alive at once, beside what the memory of a plan says of cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc.compiler import analyse
from schedc.ir.plan import Level, Recompute
from schedc_runtime.models.gpt import GptBlock, GPTConfig
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import Boundary, TensorSpec
from schedc_runtime.stage.stage import Stage
from support.live_bytes import LiveBytes
from support.plan_cases import written
from support.recompute_cases import Block, block_stage
from support.sweeps import swept

TOKENS, LAYERS = 96, 2
SIZES = [(64, 48, 8, 2, 1), (16, 96, 8, 3, 0), (128, 16, 8, 4, 2)]
"""Columns of a token and of an expert, experts, choices, shared experts."""


def alive_at_once(stage: Stage, x: Tensor) -> int:
    """The most bytes inside the second forward and backward of a stage, its parameters and their gradients apart."""
    peak = 0
    for _ in range(2):
        for parameter in stage.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        own = [p for parameter in stage.module.parameters() for p in (parameter, parameter.grad) if p is not None]
        gradient = torch.randn_like(x)
        with LiveBytes([*own, *stage.module.buffers(), x, gradient]) as live:
            stage.forward(0, (x,))
            stage.backward(0, (gradient,))
        peak = live.peak
    return peak


def predicted(folder: Path, lines: str) -> float:
    """Bytes that a rank with one microbatch in flight holds inside its cells, parameters apart."""
    plan = f"layers {2 * LAYERS} {lines} tokens {TOKENS} dtype fp32 parameters moe 0 MB memory 1 GB"
    held = analyse(written(folder, plan, "1f1b(P = 2, M = 1)"), {}).memory.held
    assert held is not None
    assert held.inside is not None
    assert (held.inside > held.peak).all()
    return float(held.inside[1])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("level", swept([*Level], [*Level][::4]))
@pytest.mark.parametrize(("hidden", "width", "experts", "top", "shared"), SIZES)
def test_layers_with_experts_hold_no_more_than_predicted(
    tmp_path: Path, level: Level, hidden: int, width: int, experts: int, top: int, shared: int
) -> None:
    """Their attention is one product here, and holds less than a model's."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(hidden, width, experts, top, shared) for _ in range(LAYERS)]
    counted = alive_at_once(block_stage(blocks, TOKENS, hidden, Recompute(level)), torch.randn(TOKENS, hidden))
    sizes = f"experts {experts} top {top} shared {shared} width {width} hidden {hidden} topology nodes 1 x 1"
    recompute = "" if level is Level.NONE else f"recompute {level}"
    ratio = counted / predicted(tmp_path, f"{sizes} {recompute}")
    assert 0.5 <= ratio <= 1


@pytest.mark.parametrize("level", [Level.NONE, Level.NORM, Level.ACT, Level.LAYER])
def test_dense_layers_hold_no_more_than_predicted(tmp_path: Path, level: Level) -> None:
    torch.manual_seed(0)
    blocks = [GptBlock(GPTConfig(width=64, heads=4, blocks=LAYERS)) for _ in range(LAYERS)]
    parts = partition(nn.Sequential(*blocks), 1, blocks="", example=torch.randn(8, 12, 64))
    stage = Stage(parts.modules[0], 0, 2, blocks=parts.blocks[0])
    spec = TensorSpec((8, 12, 64), torch.float32, True)
    edges = (pytree.tree_structure((0,)), ("x",)), (pytree.tree_structure(0), ("y",))
    stage.bind(*[Boundary((spec,), *edge) for edge in edges])
    stage.set_recomputation(Recompute(level))
    recompute = "" if level is Level.NONE else f"recompute {level}"
    lines = f"dense {2 * LAYERS} block hidden 64 heads 4 inner 256 matrices 2 {recompute}"
    ratio = alive_at_once(stage, torch.randn(8, 12, 64)) / predicted(tmp_path, lines)
    assert 0.5 <= ratio <= 1
