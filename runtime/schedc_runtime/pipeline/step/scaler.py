"""Gradients divided by a gradient scaler's scale, with one answer on all ranks to whether some are not finite."""

from __future__ import annotations

from typing import Any

import torch

from schedc_runtime.data_parallel.mixed_lists import gradients_here
from schedc_runtime.pipeline.build.assembly import Assembly


def unscale(assembly: Assembly, scaler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """`GradScaler.unscale_` on all ranks: all of them skip the optimizer's step, or none. A collective.

    scaler: a `torch.amp.GradScaler`. optimizer: that of this process; None where it has no parameters.
    """
    if not scaler.is_enabled():
        return
    scaler.scale(torch.zeros((), device=assembly.device))  # makes the scale, where this is its first use
    if optimizer is not None:
        with gradients_here(optimizer):
            scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    mine = any(bool(flag) for flag in flags.values())
    with assembly.guard("looking for gradients that are not finite"):
        bad = assembly.guard.control.fold("looking for gradients that are not finite", mine or None, any)
    # A rank without gradients has no flag, and `GradScaler.step` demands one.
    flags.setdefault(assembly.device, torch.zeros((), device=assembly.device))
    for flag in flags.values():
        flag.fill_(float(bad))
