"""Which dimension of each tensor of a batch has the rows, and how rows go to microbatches.

Rows are the first dimension, else that of `Pipeline(example_dims=)`. They go to microbatches in equal parts, or padded
to them by rows that are repeated.

input_ids     [rows, T]       0
position_ids  [3, rows, T]    1      example_dims={"position_ids": 1}
table         [T, T]          None   example_dims={"table": None}: every microbatch has all of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import of_transformers, positional_names


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

    @property
    def each(self) -> list[int]:
        """[parts] rows of each microbatch, without repeated ones."""
        least, more = divmod(self.rows, self.parts)
        return [least + 1] * more + [least] * (self.parts - more)

    def sources(self, device: torch.device) -> Tensor:
        """[parts * size] the row of the batch that each place takes. A microbatch repeats its own last row."""
        part = torch.arange(self.parts, device=device).unsqueeze(1)
        least, more = divmod(self.rows, self.parts)
        start = part * least + part.clamp(max=more)
        last = (start + least + (part < more) - 1).clamp(min=0)
        places = torch.minimum(start + torch.arange(self.size, device=device), last)
        return places.clamp(max=self.rows - 1).flatten()


Dim = int | None
"""Dimension of the rows of a tensor; None where all microbatches share the tensor."""
Dims = Mapping[str | int, Dim]
"""Dimensions by the name of an argument, or by its position in a tuple, for all tensors inside the argument."""
ROWS_FIRST: Dims = MappingProxyType({})
GRIDS = -4096
"""Dimension of the rows in what Hugging Face models take as positions: 1 in [3 or 4, rows, T], else 0."""


def dims_of(model: nn.Module, given: Mapping[str, Dim] | None, inputs: Sequence[str] | None) -> Dims:
    """The dimensions of a batch of ``model``. inputs: names of positional arguments, in place of the forward's.

    Raises `RuntimeFault` for a name that the forward does not take, and for what is no dimension.
    """
    names, anything = positional_names(model, inputs)
    for name, dim in (given or {}).items():
        if not anything and name not in names:
            raise RuntimeFault(f"example_dims names `{name}`; {type(model).__name__} takes {names}", "name an argument")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise RuntimeFault(
                f"example_dims[{name!r}] is {dim!r}", "give the dimension of the rows, or None for a tensor without"
            )
    dims: dict[Any, Dim] = {"position_ids": GRIDS} if of_transformers(model) else {}
    dims |= given or {}
    return {**dims, **{position: dims[name] for position, name in enumerate(names) if name in dims}}


def inside(value: Any, dims: Dims, dim: Dim) -> Iterator[tuple[Any, Dims, Dim]]:
    """(item, dims of its inside, its dim) of each item of a tuple, list or mapping. dim: that of ``value``."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield item, ROWS_FIRST, dims.get(key, dim)


def dim_of_batch(batch: Any, dims: Dims) -> Dim:
    """The dimension of the rows of a batch that is one tensor, the first argument; 0 of other batches."""
    return dims.get(0, 0) if isinstance(batch, Tensor) else 0


def dim_of(tensor: Tensor, dim: Dim) -> Dim:
    """The dimension of the rows of ``tensor`` [...], not negative; one that is out of range stays so."""
    if dim == GRIDS:
        return 1 if tensor.dim() == 3 and tensor.shape[0] in (3, 4) else 0
    return dim + tensor.dim() if dim is not None and -tensor.dim() <= dim < 0 else dim
