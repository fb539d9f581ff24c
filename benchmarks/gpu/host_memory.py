"""Pipelines of dense blocks with all ranks on the setting's device, for the sections that move activations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from gpu.setting import Setting, drawn
from schedc.ir.program import Program
from schedc_runtime import Cut, Pipeline
from schedc_runtime.models.moe_transformer import MoeBlock, MoEConfig


def blocks(setting: Setting, count: int) -> nn.Sequential:
    """Dense blocks in the proportions of DeepSeek-V3. Queries, keys and values have heads of one width."""
    torch.manual_seed(0)
    width = setting.width
    head = 64 if setting.gpu else 8
    config = MoEConfig(
        width=width, heads=width // (2 * head), inner=18 * width // 7, query_rank=width // 4,
        key_value_rank=width // 14, plain=head, rotary=head, value=2 * head,
    )  # fmt: skip
    with torch.device(setting.device):
        return nn.Sequential(*(MoeBlock(config, dense=True) for _ in range(count))).to(setting.dtype)


def compiled(schedule: str, layers: int, lines: str) -> Program:
    """The program of a plan with these lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.sched"
        text = f"sched 1\n\nplan measured = {schedule} {{\n  layers {layers}\n  {lines}\n}}\n"
        path.write_text(text, encoding="utf-8")
        return schedc.compile(f"{path}:measured")


def pipeline(model: nn.Module, program: Program) -> Pipeline:
    """A pipeline that trains the model's own parameters, which several pipelines may share."""
    return Pipeline(
        model, program, loss_fn=functional.mse_loss, in_process=True, cut=Cut(blocks="", segmented=True),
        check_finite=False,
    )  # fmt: skip


def batch_of(setting: Setting, microbatches: int, tokens: int) -> tuple[Tensor, Tensor]:
    """[microbatches, tokens, width] a batch, and targets that are all 0."""
    batch = drawn(setting, 1, tokens, setting.width, seed=2).expand(microbatches, -1, -1).contiguous()
    return batch, batch.new_zeros(()).expand_as(batch)


def stepping(pipe: Pipeline, batch: Tensor, targets: Tensor) -> Callable[[], Any]:
    """A step that adds to gradients which are there, so that they are no part of its peak behind the first."""
    return lambda: pipe.step(batch, targets)


def moved(pipe: Pipeline) -> tuple[int, int]:
    """Activations that have left the device so far, and their bytes."""
    accounts = [
        stage.offload.account for place in pipe.places for stage in pipe.held(place) if stage.offload is not None
    ]
    return sum(account.offloads for account in accounts), sum(account.moved for account in accounts)
