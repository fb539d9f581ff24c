"""The state of random numbers: taken before something draws them, so that the same ones can be drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    """Those of ``devices``, each once, that have random numbers of their own, other than the processor's."""
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def random_state(devices: Sequence[torch.device]) -> Tensor:
    """The state of the processor, then of ``devices``, which are `gpus`."""
    return torch.cat([torch.get_rng_state(), *[torch.cuda.get_rng_state(device) for device in devices]])


@contextmanager
def drawn_again(state: Tensor, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, what was drawn since `random_state` gave ``state`` is drawn once more; of that nothing is left behind."""
    with torch.random.fork_rng(devices):
        size = len(torch.get_rng_state())
        torch.set_rng_state(state[:size])
        for device, part in zip(devices, state[size:].chunk(max(1, len(devices))), strict=False):
            torch.cuda.set_rng_state(part, device)
        yield
