"""Speeds of the lanes between a device and pinned host memory, for the line `host` of a plan."""

from __future__ import annotations

from statistics import median

import torch

BYTES = 1 << 28
"""Bytes of a copy, of which a device needs as many."""


def host_speeds(device: torch.device, repetitions: int) -> tuple[float, float] | None:
    """Bytes per second of copies to the host and of copies back, each alone, the median. None without a device."""
    if device.type != "cuda":
        return None
    here = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    there = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    speeds = []
    for into, source in ((there, here), (here, there)):
        times = []
        for repetition in range(1 + repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            into.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            times += [begin.elapsed_time(end) / 1e3] if repetition else []
        speeds.append(BYTES / median(times))
    return speeds[0], speeds[1]


def speeds_text(speeds: tuple[float, float] | None) -> str:
    """What a cost file's first lines say of the lanes."""
    if speeds is None:
        return "d2h, h2d: not measured: no device."
    out, back = (f"{speed / 1e9:.4g} GB/s" for speed in speeds)
    return f"d2h {out}, h2d {back}, pinned, each alone: write them into the line `host` of a plan."
