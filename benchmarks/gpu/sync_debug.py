"""Section `sync_debug`: operations of 200 steps that wait for the device, by torch's debug mode.

The simulated twin counts where the host asks tensors for numbers in one step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from host_asks import counting

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting
from gpu.step import MODES, pipeline, stepping

CLAIMS = (
    Claim(
        "no operation of a step waits for the device",
        "MoE blocks with a capacity of 1.25, 200 steps behind the first",
        (Bound("sync_debug_errors", "==", 0),),
        must=True,
    ),
    Claim(
        "the host asks the device for numbers once per step, for the loss",
        "MoE blocks with a capacity of 1.25, one step",
        (Bound("sync_debug.asks_per_step", "<=", 1),),
        on_cpu=True,
        must=True,
    ),
)

WAITS = "called a synchronizing"
"""Part of the message that torch's debug mode has for every operation that waits."""
STEPS = 200


def measure(setting: Setting) -> dict[str, Any]:
    step = stepping(setting, pipeline(setting, capacity=MODES["padded"]))
    step()
    found = waits(step) if setting.gpu else []
    with counting() as counted:
        step()
    entries = {"steps": STEPS * setting.gpu, "waits": found[:8], "asks_per_step": sum(counted.asks.values())}
    watches = "torch's debug mode watches CUDA alone"
    return {"sync_debug_errors": len(found) if setting.gpu else not_measured(watches), "sync_debug": entries}


def waits(step: Callable[[], Any]) -> list[str]:
    """What waited in the steps: file and line, by torch's messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if WAITS in str(each.message)]
