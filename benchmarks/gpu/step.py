"""Steps of a pipeline of one rank on the setting's device, for the sections that measure whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import schedc
from gpu.setting import Setting, drawn
from schedc.ir.plan import Capacity, Level, Recompute
from schedc.plan import Plan
from schedc_runtime import Cut, Pipeline
from schedc_runtime.models.moe_transformer import MoeBlock, MoEConfig
from schedc_runtime.moe.router import RouterConfig

MICROBATCHES, BLOCKS = 2, 2
"""A step on a GPU has as many. A step on a CPU has one block."""

MODES = {"padded": 1.25, "exact": None}
"""The capacity of each way to know sizes."""


def modes(setting: Setting) -> dict[str, float | None]:
    """The modes of a section. On a CPU the first of them shows that the section runs."""
    return MODES if setting.gpu else {"padded": MODES["padded"]}


def pipeline(
    setting: Setting, level: Level = Level.NONE, capacity: float | None = None, graphs: bool | str = False
) -> Pipeline:
    """A pipeline of one rank with blocks of DeepSeek-V3's kind, cut into segments. graphs: as in a `Cut`."""
    torch.manual_seed(0)
    width = setting.width
    heads = max(2, width // 128)
    config = MoEConfig(
        width=width, heads=heads, expert_inner=setting.inner, inner=setting.inner, query_rank=max(8, width // 5),
        key_value_rank=max(8, width // 14), plain=16 if width < 1024 else 128, rotary=8 if width < 1024 else 64,
        value=16 if width < 1024 else 128, routing=RouterConfig(setting.experts, setting.top),
    )  # fmt: skip
    with torch.device(setting.device):
        blocks = [MoeBlock(config, dense=False) for _ in range(BLOCKS if setting.gpu else 1)]
    model = nn.Sequential(*blocks).to(setting.dtype)
    plan = Plan(recompute=(Recompute(level),), capacity=None if capacity is None else Capacity(capacity))
    program = schedc.compile("1f1b", P=1, M=MICROBATCHES)
    cut = Cut(blocks="", segmented=True, graphs=graphs)
    return Pipeline(model, program, loss_fn=functional.mse_loss, plan=plan, cut=cut, check_finite=False)


def stepping(setting: Setting, pipe: Pipeline) -> Callable[[], Any]:
    """A training step of the pipeline, on a batch that is on the device already."""
    batch = drawn(setting, MICROBATCHES, setting.tokens, setting.width, seed=2)
    targets = torch.zeros_like(batch)

    def step() -> Any:
        pipe.zero_grad()
        return pipe.step(batch, targets)

    return step
