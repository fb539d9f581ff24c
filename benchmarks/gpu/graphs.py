"""Section `graphs`: steps with replayed segments over steps with launches: bits and time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import schedc
from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting, drawn, medians
from gpu.step import MICROBATCHES, stepping
from schedc_runtime import Cut, Pipeline
from schedc_runtime.models.moe_transformer import MoeBlock, MoEConfig

CLAIMS = (
    Claim(
        "steps that replay their segments have the bits of steps that launch",
        "dense blocks with static shapes, no dropout",
        (Bound("graphs.same_bits", "==", True),),
        on_cpu=True,
    ),
    Claim(
        "steps that replay their segments are no slower",
        "four dense blocks of width 7168, 2 microbatches of 4,096 tokens in bf16",
        (Bound("graphs.speedup", ">=", 1.0),),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    pipes = {name: pipeline(setting, name == "replayed") for name in ("launched", "replayed")}
    results = {name: one_step(setting, pipe) for name, pipe in pipes.items()}
    entries: dict[str, Any] = {
        "same_bits": all(map(torch.equal, results["launched"], results["replayed"])),
        "report": pipes["replayed"].report(),
    }
    if not setting.gpu:
        return {"graphs": entries | {"speedup": not_measured("a tape on a CPU replays no faster than it launches")}}
    times = medians(setting, {name: stepping(setting, pipe) for name, pipe in pipes.items()})
    return {"graphs": entries | {"speedup": times["launched"] / times["replayed"]}}


def pipeline(setting: Setting, graphs: bool) -> Pipeline:
    """A pipeline of one rank with dense blocks, whose segments have static shapes."""
    torch.manual_seed(0)
    config = MoEConfig(
        width=setting.width, heads=max(2, setting.width // 128), inner=setting.inner, query_rank=setting.width // 4,
        key_value_rank=setting.width // 8,
    )  # fmt: skip
    with torch.device(setting.device):
        blocks = [MoeBlock(config, dense=True) for _ in range(4 if setting.gpu else 1)]
    return Pipeline(
        nn.Sequential(*blocks).to(setting.dtype), schedc.compile("1f1b", P=1, M=MICROBATCHES),
        loss_fn=functional.mse_loss, cut=Cut(blocks="", segmented=True, graphs=graphs), check_finite=False,
    )  # fmt: skip


def one_step(setting: Setting, pipe: Pipeline) -> list[torch.Tensor]:
    """The loss of a step, and copies of all gradients."""
    batch = drawn(setting, MICROBATCHES, setting.tokens, setting.width, seed=2)
    pipe.zero_grad()
    loss = pipe.step(batch, torch.zeros_like(batch))
    return [loss, *(parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None)]
