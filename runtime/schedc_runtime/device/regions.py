"""Marks the part of a step that a graph would hold, for whoever watches steps; nobody does unless asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor


class RegionWatcher(Protocol):
    """Hears of regions. The arguments are those of `graph_region`, with the parameters by name."""

    def begin(self, inputs: Any, parameters: Mapping[str, Tensor], counted: bool) -> None: ...

    def end(self, parameters: Mapping[str, Tensor]) -> None: ...


WATCHERS: list[RegionWatcher] = []
"""Watchers of this process. A region belongs to the last one."""


_UNWATCHED = nullcontext()


def graph_region(
    inputs: Any, parameters: Callable[[], Mapping[str, Tensor]], *, counted: bool
) -> AbstractContextManager[None]:
    """What runs inside is what a graph would hold.

    inputs: whatever has tensors [...] that are copied to one address before a graph runs. parameters: gives those whose
    gradients the step adds to, by name. counted: whether draws count on the device.
    """
    return _watched(WATCHERS[-1], inputs, parameters(), counted) if WATCHERS else _UNWATCHED


@contextmanager
def _watched(watcher: RegionWatcher, inputs: Any, named: Mapping[str, Tensor], counted: bool) -> Iterator[None]:
    watcher.begin(inputs, named, counted)
    yield
    watcher.end(named)
