"""Which streams of the device run exchanges at high priority: a table of lanes, and what a device has of it.

The compute of a step is on a stream of normal priority, the lowest that there is. A weight gradient there gives way to
an exchange of a lane with high priority. No priority changes the order of a program, or a bit of its results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from schedc_runtime.device.choice import device_for, gpu

LANES = {
    "comm": "rows between all ranks of an expert group (flat), and their counts",
    "rail": "rows between nodes (hierarchical, allgather)",
    "node": "rows inside a node (hierarchical, allgather)",
    "replicas": "sums of gradients and of auxiliary losses over all replicas",
    "same experts": "sums of the gradients of experts over the ranks that hold the same",
    "same products": "sums of the gradients of split products over the ranks that hold the same part",
    "tensor": "rows and columns between the ranks that split products",
}
"""What each lane carries."""


def unknown(lanes: Iterable[str]) -> list[str]:
    """Those of ``lanes`` that the table does not have."""
    return [lane for lane in lanes if lane not in LANES]


def why_no_priority(device: torch.device) -> str:
    """Why a device gives no stream a priority; empty where it does."""
    return device_for(device).supports("streams")


def stream_options(backend: str, high: bool) -> Any:
    """The options of a process group whose collectives run at high priority; None for groups as they are."""
    return gpu.high_priority() if high and backend == gpu.BACKEND else None


def told(high: Iterable[str], device: torch.device) -> list[str]:
    """A line for people about the lanes with high priority, if there are any."""
    lanes = ", ".join(high)
    reason = why_no_priority(device)
    return [f"priority: {lanes} high{f' (no effect: {reason})' if reason else ''}"] if lanes else []
