"""Section `sync_debug`: operations of a step that wait for the device, by torch's debug mode."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting
from gpu.step import modes, pipeline, stepping

CLAIMS = (
    Claim(
        "no operation of a step waits for the device",
        "MoE blocks with a capacity of 1.25, the second step",
        (Bound("sync_debug_errors", "==", 0),),
    ),
)

WAITS = "called a synchronizing"
"""Part of the message that torch's debug mode has for every operation that waits."""


def measure(setting: Setting) -> dict[str, Any]:
    counts = {name: waits(setting, capacity) for name, capacity in modes(setting).items()}
    if not setting.gpu:
        raise NotMeasured("torch's debug mode watches CUDA alone; the steps have run; benchmarks/host_asks.py counts")
    return {"sync_debug_errors": len(counts["padded"]), "sync_debug": {name: each[:8] for name, each in counts.items()}}


def waits(setting: Setting, capacity: float | None) -> list[str]:
    """What waited in the second of two steps: the first lines of torch's messages."""
    step = stepping(setting, pipeline(setting, capacity=capacity))
    step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if setting.gpu:
                torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if WAITS in str(each.message)]
