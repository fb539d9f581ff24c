"""What a torch function does besides giving a result: random numbers, writes, and the state around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from schedc_runtime.device.choice import gpu


class Ambient(NamedTuple):
    """gradients: whether they are computed. autocast: per device, whether it is on, and its dtype. inference: whether
    inference mode is on."""

    gradients: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    inference: bool = False


def ambient() -> Ambient:
    """The state around this line."""
    return Ambient(
        torch.is_grad_enabled(), tuple(_autocast(kind) for kind in _kinds()), torch.is_inference_mode_enabled()
    )


@contextmanager
def as_around() -> Iterator[None]:
    """Lets a model be recorded inside inference mode, whose tensors do not tell when they are written to.

    The mode is off inside, and `torch.is_inference_mode_enabled`, which a model may ask, says what is around.
    """
    state = ambient()
    if not state.inference:
        yield
        return
    told = mock.patch.object(torch, "is_inference_mode_enabled", partial(bool, True))
    with torch.inference_mode(False), torch.set_grad_enabled(state.gradients), told:
        yield


def enter(state: Ambient) -> None:
    """Set the state around the next lines."""
    torch.set_grad_enabled(state.gradients)
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


@contextmanager
def kept_ambient(states: tuple[Ambient, ...]) -> Iterator[None]:
    """Puts the state back behind code that changes it to ``states``. Drops casts that no other code used."""
    before = ambient()
    try:
        yield
    finally:
        enter(before)
        if not any(enabled for _, enabled, _ in before.autocast) and any(e for s in states for _, e, _ in s.autocast):
            torch.clear_autocast_cache()


def after(value: Any, _write: Any) -> Any:
    """``value``, once a write to its memory is done."""
    return value


@cache
def _kinds() -> tuple[str, ...]:
    return ("cpu", gpu.TYPE) if gpu.available() else ("cpu",)


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
