"""Section `failures`: a device that stops. The host gives up in time, and all communicators are aborted.

On one GPU groups of one rank have sums in flight behind works that take long. The simulated twin has two processes
over gloo. In one process events stop to end.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gpu.claims import Bound, Claim
from gpu.setting import Setting
from schedc_runtime.device.choice import HostCopy, gpu
from schedc_runtime.device.limits import DeviceLate, HostLimit, limited
from schedc_runtime.testing import pool
from schedc_runtime.transport.process_groups import leave_groups

CLAIMS = (
    Claim(
        "a host whose device has stopped gives up behind its limit",
        "limit of 1 s; works of 20 s on a GPU",
        (Bound("failures.seconds", "<=", 6.0), Bound("failures.named", "==", True)),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "all communicators are aborted before one is destroyed, and none blocks",
        "the same, with a sum in flight",
        (Bound("failures.aborted_first", "==", True), Bound("failures.abort_seconds", "<=", 15.0)),
        on_cpu=True,
        must=True,
    ),
)

LIMIT = 1.0
CYCLES = 40_000_000_000
"""Cycles that the device sleeps: about 20 s."""


def measure(setting: Setting) -> dict[str, Any]:
    return {"failures": on_gpu(setting.device) if setting.gpu else simulated()}


def on_gpu(device: torch.device) -> dict[str, Any]:
    """A sum of a group of one rank, behind works that take longer than the limit."""
    store, limit = dist.HashStore(), timedelta(seconds=120)
    place = torch.device(device.type, torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=place, timeout=limit)
    groups = [dist.new_group([0]) for _ in range(3)]
    numbers = torch.ones(1 << 20, device=place)
    for group in groups:
        dist.all_reduce(numbers, group=group)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    works = [dist.all_reduce(numbers, group=group, async_op=True) for group in groups]
    start, named = time.monotonic(), False
    try:
        with limited(HostLimit(LIMIT, lambda: False)):
            HostCopy(numbers).join()
    except DeviceLate:
        named = True
    waited = time.monotonic() - start
    order: list[str] = []
    abort, destroy = gpu.abort_groups, dist.destroy_process_group
    start = time.monotonic()
    with (
        patch.object(gpu, "abort_groups", lambda each: (order.append("abort"), abort(each))),
        patch.object(dist, "destroy_process_group", lambda each: (order.append("destroy"), destroy(each))),
    ):
        leave_groups(groups, abort=True)
    left = time.monotonic() - start
    del works
    dist.destroy_process_group()
    first = order == ["abort", *["destroy"] * len(groups)]
    return {"seconds": waited, "named": named, "aborted_first": first, "abort_seconds": left}


def simulated() -> dict[str, Any]:
    """Two processes; the events of one of them end no more, in the middle of a step."""
    answers = pool(2).run("runtime.ranks.fault_cases:stopped_device", timeout=60)
    left = [each for _, _, each in answers]
    return {
        "seconds": max(seconds for _, seconds, _ in answers),
        "named": all(kind == "StepTimeout" and "1F2 (stage 1, microbatch 2)" in text for (kind, text), _, _ in answers),
        "aborted_first": all(each == sorted(each) and set(each) == {"abort", "destroy"} for each in left),
        "abort_seconds": 0.0,
    }
