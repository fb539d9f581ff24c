"""Saves the state of the random generators, so that a second forward draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    """The CUDA devices among ``devices``, each once: they have random generators of their own."""
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def random_state(devices: Sequence[torch.device]) -> Tensor:
    """The states of the generators of the CPU and of ``devices``, which are `gpus`, in one tensor of bytes."""
    return torch.cat([torch.get_rng_state(), *[torch.cuda.get_rng_state(device) for device in devices]])


@contextmanager
def drawn_again(state: Tensor, devices: Sequence[torch.device]) -> Iterator[None]:
    """Draws the numbers that followed ``state`` a second time; afterwards the generators are as before."""
    with torch.random.fork_rng(devices):
        size = len(torch.get_rng_state())
        torch.set_rng_state(state[:size])
        for device, part in zip(devices, state[size:].chunk(max(1, len(devices))), strict=False):
            torch.cuda.set_rng_state(part, device)
        yield
