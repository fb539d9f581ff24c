"""Recomputation: bytes and FLOPs of every level, as counted and in closed form."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from schedc.attachments.recompute_bytes import saving
from schedc.attachments.values import Level, Recompute
from schedc_runtime.measure.held_bytes import held
from support.recompute_cases import (
    EXPERTS,
    SIZES,
    TOKENS,
    TOP,
    WIDTH,
    moe_stage,
)

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
WEIGHTS = TOP * 4 + 4 + TOP * 8
"""And of the router's weights before they are divided by their sum, of the sum, and of the choice."""
GATES = TOP * 4 - 4 * (EXPERTS + 2) / TOKENS
"""And of the gates; less the counts of all: rows by expert, tokens, flags."""
BESIDE = {
    Level.NORM: STATISTICS, Level.ACT: STATISTICS, Level.LIGHT: STATISTICS + WEIGHTS,
    Level.MEDIUM: STATISTICS + WEIGHTS, Level.FULL: STATISTICS + WEIGHTS + GATES,
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_and_flops_are_those_of_the_closed_forms(level: Level) -> None:
    none, kept_by_none, before = measured(Recompute())
    bytes_held, kept, after = measured(Recompute(level))
    expected = saving(SIZES, "fp32", level)
    assert none - bytes_held == expected.bytes + BESIDE[level]
    assert kept - kept_by_none <= 2 * TOP * 8  # the choice of both layers, where the router is recomputed
    assert (after - before) // TOKENS // 2 == expected.flops
