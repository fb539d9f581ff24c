"""How the rows of a batch go to microbatches: in equal parts, or padded to them by rows that are repeated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The rows of a batch over microbatches, as evenly as can be; the first microbatches have one row more.

    rows: number of rows. parts: microbatches of the step, summed over replicas.
    """

    rows: int
    parts: int

    @property
    def size(self) -> int:
        """Rows of every microbatch, repeated ones included."""
        return -(-self.rows // self.parts)

    @property
    def padded(self) -> bool:
        """Whether rows are repeated."""
        return self.rows % self.parts != 0

    def of(self, part: int) -> int:
        """Rows of one microbatch, without repeated ones."""
        return self.rows // self.parts + (part < self.rows % self.parts)

    def sources(self, device: torch.device) -> Tensor:
        """[parts * size] the row of the batch that each place takes. A microbatch repeats its own last row."""
        part = torch.arange(self.parts, device=device).unsqueeze(1)
        least, more = divmod(self.rows, self.parts)
        start = part * least + part.clamp(max=more)
        last = (start + least + (part < more) - 1).clamp(min=0)
        places = torch.minimum(start + torch.arange(self.size, device=device), last)
        return places.clamp(max=self.rows - 1).flatten()
