"""Where equal bits can be expected: which pipelines can be audited, and which ranks may repeat for each other."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from schedc_runtime.device.choice import gpu
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.exchange import RoutingLayer
from schedc_runtime.stage.hooks import has_hooks

ALIKE = ("device", "torch", "threads")
"""The facts of two ranks that must be equal for equal bits."""


def device_facts(device: torch.device) -> dict[str, Any]:
    """What computes here, as JSON: device, versions and threads, and where it is."""
    on_gpu = device.type == gpu.TYPE
    return {
        "device": gpu.name_of_device() if on_gpu else _processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _processor() -> str:
    """The name of the CPU, with the instructions that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def obstacles(assembly: Assembly) -> Iterator[tuple[str, str]]:
    """Why a microbatch cannot be repeated in this pipeline, each with what to do."""
    settings, mesh, plan = assembly.settings, assembly.mesh, assembly.plan
    if mesh.size == 1:
        yield "a pipeline of one rank has nobody to repeat a microbatch", "train on several ranks"
    if settings.rng != "by name":
        yield (
            f"rng={settings.rng!r} draws numbers that no other rank can draw again",
            'leave out rng, or give "by name"',
        )
    if mesh.tensor > 1:
        yield "products are split over tensor ranks, so that no rank alone can repeat a stage", "leave `audit` out"
    if any(stage.carries is not None for stage in assembly.held()):
        yield "segments of a sequence carry keys, so that none can be repeated alone", "leave `audit` out"
    if mesh.experts > 1:
        yield "experts are shared by several ranks, so that no rank alone can repeat a stage", "leave `audit` out"
    if mesh.shard_dense or assembly.shards is not None:
        yield "the dense parts are sharded, so that no rank alone has the weights of a stage", "leave `audit` out"
    if plan.bound is not None:
        yield "buffers are bounded, so that a step may run a second time", "leave `bound` out of the plan"
    if settings.cut.graphs:
        yield "graphs replay what they captured, and cannot repeat a single microbatch", "leave Cut(graphs=...) out"
    hooked = [name for stage in assembly.held() for name, each in stage.module.named_parameters() if has_hooks(each)]
    if hooked:
        yield f"`{hooked[0]}` has hooks, which a repetition would run again", "register hooks on modules instead"


def may_borrow(assembly: Assembly, stage: int) -> str:
    """Why a rank that does not hold a stage cannot repeat it with the weights of another; "" where it can."""
    if assembly.compile is not None:
        return "its units are compiled"
    if assembly.fused is not None or assembly.plan.fuse:
        return "its chains are fused"
    if assembly.norms is not None:
        return "its norms are computed by a provider"
    if any(isinstance(part, RoutingLayer) for part in assembly.partition.modules[stage].modules()):
        return "it has experts"
    return ""


def may_repeat(suspect: Mapping[str, Any], helper: Mapping[str, Any]) -> bool:
    """Whether two ranks, given by their facts, may be expected to compute equal bits."""
    return all(suspect[name] == helper[name] for name in ALIKE)
