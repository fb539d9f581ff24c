"""The loads of a layer's experts in the last steps, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 32
"""Steps whose loads are kept."""


class LoadHistory:
    """The loads of the last `KEPT` steps. The layer's own sum of choices goes on; differences of it are kept."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._sum: Tensor | None = None

    def note(self, chosen: Tensor) -> None:
        """A training step has succeeded. chosen: [experts] choices since the sum was cleared."""
        now = chosen.clone()
        self._kept = [*self._kept[1 - KEPT :], now if self._sum is None else now - self._sum]
        self._sum = now

    def cleared(self) -> None:
        """The layer's sum begins anew."""
        self._sum = None

    @property
    def loads(self) -> Tensor | None:
        """[steps, experts] choices by step, the oldest first; None before any step."""
        return torch.stack(self._kept) if self._kept else None
