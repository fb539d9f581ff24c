"""Section `runahead`: whether the host stays ahead, so that the device never stands idle for a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting
from gpu.step import BLOCKS, MICROBATCHES, modes, pipeline, stepping

CLAIMS = (
    Claim(
        "the device never stands idle for a launch",
        "MoE blocks with a capacity of 1.25, the second step; segments of 0.2 ms or more",
        (Bound("runahead.stalls_per_step", "==", 0),),
    ),
)


class Kernel(NamedTuple):
    """Work of the device. start, end: when it ran, and launched: when the host had asked for it, in ns on one clock."""

    name: str
    start: int
    end: int
    launched: int


def measure(setting: Setting) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.gpu else [])]
    results = {}
    for name, capacity in modes(setting).items():
        step = stepping(setting, pipeline(setting, capacity=capacity))
        step()
        with profile(activities=activities) as profiler:
            step()
            if setting.gpu:
                torch.cuda.synchronize()
        kernels = kernels_of(profiler)
        results[name] = summary(kernels)
    if not setting.gpu:
        raise NotMeasured("a CPU runs what it launches at once; the steps have run under the profiler")
    per_block = results["padded"]["launches"] / (BLOCKS * MICROBATCHES)
    stalls = results["padded"]["stalls"]
    return {"runahead": {"stalls_per_step": stalls, "launches_per_block": per_block, **results}}


def kernels_of(profiler: Any) -> list[Kernel]:
    """Work of the device whose launch was seen, in the order of its starts."""
    events = profiler.profiler.kineto_results.events()
    launches = {
        event.correlation_id(): event.start_ns() + event.duration_ns()
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CPU and event.name().startswith(("cuda", "cu"))
    }
    return sorted(
        (
            Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), launches[number])
            for event in events
            if event.device_type() == torch.autograd.DeviceType.CUDA and (number := event.correlation_id()) in launches
        ),
        key=lambda kernel: kernel.start,
    )


def stalls(kernels: Sequence[Kernel], ramp: int = 1) -> list[Kernel]:
    """The work that the host asked for when all work before it had ended. ramp: pieces at the begin that do not count.

    kernels: in the order of their starts.
    """
    late, busy_until = [], 0
    for number, kernel in enumerate(kernels):
        if number >= ramp and kernel.launched > busy_until:
            late.append(kernel)
        busy_until = max(busy_until, kernel.end)
    return late


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Number of stalls and of launches, and ms of the device: idle for a launch, and busy."""
    late, idle, busy_until = stalls(kernels), 0, kernels[0].end if kernels else 0
    for kernel in kernels[1:]:
        idle += max(0, kernel.start - busy_until) if kernel in late else 0
        busy_until = max(busy_until, kernel.end)
    return {
        "stalls": len(late),
        "launches": len(kernels),
        "idle_ms": idle / 1e6,
        "busy_ms": sum(kernel.end - kernel.start for kernel in kernels) / 1e6,
        "first": [kernel.name for kernel in late[:5]],
    }
