"""Section `roofline`: our own kernels against the bandwidth of the device, which a copy measures.

Each of these kernels reads and writes every element once, so that bytes over time is bounded by that bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting, medians
from schedc_runtime.kernels.library import lacks_kernels
from schedc_runtime.kernels.sums import add_gradients
from schedc_runtime.kernels.swiglu import swiglu, swiglu_backward

CLAIMS = (
    Claim(
        "our own kernels move bytes nearly as fast as a copy does",
        "bf16; 32,768 rows of 2,048 columns for SwiGLU, gradients of 32 experts for the sums",
        (Bound("roofline.least", ">=", 0.75),),
    ),
)


class Case(NamedTuple):
    """A call of a kernel, and the bytes that it has to move."""

    call: Callable[[], Any]
    bytes: int


def measure(setting: Setting) -> dict[str, Any]:
    cases = {"copy": copied(setting), **gated(setting), "add_gradients": sums(setting)}
    times = medians(setting, {name: case.call for name, case in cases.items()})
    speeds = {name: case.bytes / times[name] for name, case in cases.items()}
    if reason := lacks_kernels(setting.device):
        return {"roofline": {"least": not_measured(f"twins ran: {reason}"), "kernels": len(cases) - 1}}
    over_copy = {name: speed / speeds["copy"] for name, speed in speeds.items() if name != "copy"}
    return {
        "roofline": {
            "least": min(over_copy.values()), "over_copy": over_copy, "kernels": len(over_copy),
            "bytes_per_second": speeds["copy"],
        }
    }  # fmt: skip


def made(setting: Setting, *shape: int) -> Tensor:
    """[...] numbers from 0 to 1, made on the device."""
    return torch.rand(shape, dtype=setting.dtype, device=setting.device)


def copied(setting: Setting) -> Case:
    """A copy of memory of the device to other memory there."""
    source = made(setting, 8 * setting.tokens, setting.width)
    target = torch.empty_like(source)
    return Case(lambda: target.copy_(source), 2 * source.nbytes)


def gated(setting: Setting) -> dict[str, Case]:
    """SwiGLU forward and backward, without a bias."""
    rows = 8 * setting.tokens
    gate, up, grad = (made(setting, rows, setting.inner) for _ in range(3))
    gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
    back = (grad, gate, up, None, None, None, gate_grad, up_grad, None)
    return {
        "swiglu": Case(lambda: swiglu(gate, up), 3 * gate.nbytes),
        "swiglu_backward": Case(lambda: swiglu_backward(*back), 5 * gate.nbytes),
    }


def sums(setting: Setting) -> Case:
    """The gradients of some experts' weights added to those that are there."""
    shape = setting.experts, setting.width, setting.inner
    parts = [list(made(setting, *shape).unbind()) for _ in range(2)]
    return Case(lambda: add_gradients(*parts), 3 * sum(each.nbytes for each in parts[0]))
