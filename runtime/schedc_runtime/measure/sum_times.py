"""Times sums of gradients among ranks, in halves: the cost ``dp`` of a cost file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from schedc_runtime.device.choice import device_for
from schedc_runtime.transport.collective_calls import Communicator

SUMMED_MEGABYTES = (1, 4, 16, 64)
"""Buffers whose sums are timed, in units of 2^20 bytes."""


def time_halves(communicator: Communicator, device: torch.device, warmup: int, repetitions: int) -> list[list[float]]:
    """[sizes, repetitions] seconds on this rank of half a sum of each of `SUMMED_MEGABYTES`, the mean of both halves.

    A collective of all ranks, which sum as a `Pipeline` sums gradients: by a scatter and a gather.
    """
    present, here = torch.zeros(1, device=device), device_for(device)
    samples = []
    for mega in SUMMED_MEGABYTES:
        whole, taken = torch.zeros(mega << 18, device=device), []
        for _ in range(warmup + repetitions):
            communicator.wait(communicator.all_gather(present, "all ranks are here"))
            here.current().synchronize()
            begin = time.perf_counter()
            share = communicator.wait(communicator.reduce_scatter(whole, "gradients"))
            communicator.wait(communicator.all_gather(share, "sums"))
            here.current().synchronize()
            taken.append((time.perf_counter() - begin) / 2)
        samples.append(taken[warmup:])
    return samples


def per_gigabyte(everyone: Sequence[list[list[float]]]) -> float:
    """Milliseconds of half a sum of 10^9 bytes: the slope of a line through the sizes. everyone: by rank.

    A repetition takes as long as its slowest rank. A size takes the median of its repetitions.
    """
    slowest = np.array(everyone).max(axis=0)
    speed, _ = fitted_line([mega * 2.0**20 for mega in SUMMED_MEGABYTES], [median(taken) for taken in slowest.tolist()])
    return 1e12 / speed


def fitted_line(bytes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Bytes per second and start seconds of a line through times. Relative errors count."""
    weights = 1.0 / np.array(times)
    columns = np.stack([np.array(bytes), np.ones(len(bytes))], axis=1)
    slope, start = np.linalg.lstsq(columns * weights[:, None], np.ones(len(bytes)), rcond=None)[0].tolist()
    if slope <= 0:  # noise hides the bytes: the largest size says most
        slope, start = times[-1] / bytes[-1], 0.0
    return 1.0 / slope, max(0.0, start)
