"""What of a stage boundary travels in a message: which entries of the value, in which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wire:
    """How a value (a tuple, one item per boundary entry) becomes a message and back.

    places: positions of the items that travel; specs: their shapes and dtypes, in the same order.
    template: the whole value with the constants in place, and None where a tensor goes.
    """

    places: tuple[int, ...]
    specs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    template: tuple[Any, ...]

    @cached_property
    def _whole(self) -> bool:
        return len(self.places) == len(self.template)

    def pack(self, value: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors to send."""
        return tuple(value) if self._whole else tuple([value[place] for place in self.places])

    def unpack(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The value at the other end."""
        if self._whole:
            return tensors
        value = list(self.template)
        for place, tensor in zip(self.places, tensors, strict=True):
            value[place] = tensor
        return tuple(value)

    def buffers(self, device: torch.device) -> tuple[Tensor, ...]:
        """New tensors to receive into: they become inputs of a stage, which keeps them until its backward."""
        return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.specs])
