"""Section `parity`: bits of pipelines on the device against the same stages run serially."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import schedc
from gpu.claims import Bound, Claim
from gpu.setting import Setting, deterministic
from schedc_runtime import Cut, Pipeline
from schedc_runtime.parity.reference import ReferenceCheck

CLAIMS = (
    Claim(
        "gradients and losses of pipelines have the bits of the same stages run serially",
        "1f1b, zbh1 and dualpipev with 2 ranks in one process, whole and in segments",
        (Bound("parity.bitwise", "==", True),),
        on_cpu=True,
        must=True,
    ),
)

SCHEDULES = (("1f1b", 2), ("zbh1", 2), ("dualpipev", 2))


def measure(setting: Setting) -> dict[str, Any]:
    with deterministic():
        results = {
            f"{name}{' in segments' * segmented}": differing(setting, name, ranks, segmented)
            for name, ranks in SCHEDULES
            for segmented in ((False, True) if setting.gpu else (True,))
        }
    return {"parity": {"bitwise": not any(results.values()), "differs": results}}


def differing(setting: Setting, name: str, ranks: int, segmented: bool) -> list[str]:
    """Names of what differs after a step with all ranks on the device: the loss, and gradients."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(8))).to(setting.device, torch.float32)
    program = schedc.compile(name, P=ranks, M=4)
    check = ReferenceCheck(model, program, functional.mse_loss, 0.1, segmented)
    pipe = Pipeline(
        model, program, loss_fn=functional.mse_loss, in_process=True, cut=Cut(blocks="", segmented=segmented)
    )
    batch, targets = (torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))).to(setting.device)
    return check.check(pipe, pipe.step(batch, targets), batch, targets)
