"""Remembers where the random numbers stand, so that a second forward draws the same ones.

By name that is the key of the last draw. Otherwise it is the state of the generators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from schedc_runtime.device.choice import device_for
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.random_numbers.session import Mark, default_generator

RandomPlace = Tensor | Mark
"""[bytes] the states of the generators, or the last key on each device."""


def gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    """The GPUs among ``devices``, each once: a GPU has its own random generator."""
    return [device for device in dict.fromkeys(devices) if not device_for(device).supports("own generator")]


def random_place(devices: Sequence[torch.device], draws: bool = True) -> RandomPlace | None:
    """Where the random numbers stand. devices: `gpus`. draws: whether anything draws, if numbers are not by name."""
    if (numbers := session()) is not None:
        return numbers.mark()
    return random_state(devices) if draws else None


def drawn_since(place: RandomPlace, devices: Sequence[torch.device]) -> bool:
    """Whether a number has been drawn since ``place``."""
    if isinstance(place, dict):
        return random_place(devices) != place
    return not torch.equal(place, random_state(devices))


def random_state(devices: Sequence[torch.device]) -> Tensor:
    """The states of the generators of the CPU and of ``devices``, which are `gpus`, in one tensor of bytes."""
    return torch.cat([torch.get_rng_state(), *[default_generator(device).get_state() for device in devices]])


@contextmanager
def drawn_again(place: RandomPlace, devices: Sequence[torch.device]) -> Iterator[None]:
    """Draws the numbers that followed ``place`` a second time; afterwards the generators are as before."""
    if isinstance(place, dict):
        numbers = session()
        assert numbers is not None, "a repetition belongs to the step of its forward"
        with numbers.repeating(place):
            yield
        return
    with torch.random.fork_rng(devices):
        size = len(torch.get_rng_state())
        torch.set_rng_state(place[:size])
        for device, part in zip(devices, place[size:].chunk(max(1, len(devices))), strict=False):
            default_generator(device).set_state(part)
        yield
