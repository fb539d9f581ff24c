"""Marks the part of a step that a graph would hold, for whoever watches steps; nobody does unless asked to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class RegionWatcher(Protocol):
    """What hears of regions. The arguments are those of `region`."""

    def begin(self, inputs: Any, parameters: Mapping[str, Tensor], counted: bool) -> None: ...

    def end(self, parameters: Mapping[str, Tensor]) -> None: ...


WATCHERS: list[RegionWatcher] = []
"""Watchers of this process. A region belongs to the last one."""


@contextmanager
def region(inputs: Any, parameters: Mapping[str, Tensor], *, counted: bool) -> Iterator[None]:
    """What runs inside is what a graph would hold.

    inputs: whatever has tensors [...] that are copied to one address before a graph runs. parameters: those whose
    gradients the step adds to, by name. counted: whether draws count on the device.
    """
    watcher = WATCHERS[-1] if WATCHERS else None
    if watcher is not None:
        watcher.begin(inputs, parameters, counted)
    yield
    if watcher is not None:
        watcher.end(parameters)
