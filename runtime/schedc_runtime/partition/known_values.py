"""A fact about the values of an argument, which a recording may depend on (`values`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KnownValues(NamedTuple):
    """A fact about all values of a tensor: they are ``first``, or count from it along the last dimension."""

    counting: bool
    first: int

    def tensor(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A real tensor of a shape, with the dtype and device of ``like``, which may be a fake."""
        row = torch.arange(shape[-1], device=like.device) if self.counting else torch.zeros((), device=like.device)
        return (row + self.first).to(like.dtype).expand(tuple(shape)).contiguous()
