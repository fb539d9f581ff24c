"""Splits what crosses a boundary into slices of a microbatch's rows, and joins it again.

    whole [rows, ...] --split--> [rows / k, ...] of each slice --join--> whole

Which dimension has the rows follows from two recordings of the model: of a whole microbatch, and of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.boundary import Boundary, TensorSpec

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class SlicedBoundary:
    """A boundary of a stage that runs microbatches in slices.

    whole: the boundary of a microbatch, whose tensors are sent. part: that of a slice.
    dims: [tensors] dimension of the rows; None for a tensor that is the same in all slices.
    """

    whole: Boundary
    part: Boundary
    slices: int
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, whole: Boundary, part: Boundary, slices: int) -> SlicedBoundary:
        """Raises `PartitionError` for a tensor whose shape does not show the rows of slices."""
        pairs = list(zip(whole.tensors, part.tensors, strict=False))
        if len(whole.tensors) != len(part.tensors):
            raise PartitionError(
                f"{len(whole.tensors)} tensors of a microbatch cross ({', '.join(whole.names)}), and"
                f" {len(part.tensors)} of a slice",
                "leave `slices` out: the model computes otherwise with fewer rows",
            )
        return cls(whole, part, slices, tuple(_rows_of(*pair, slices, whole.names) for pair in pairs))

    def split(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """[slices] the tensors of each, of those of a microbatch."""
        columns = [self._parts(*pair) for pair in zip(tensors, self.dims, strict=True)]
        return [tuple([column[number] for column in columns]) for number in range(self.slices)]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """The tensors of a microbatch, of those of its slices. What is the same in all is that of the first."""
        columns = zip(*parts, strict=True)
        return tuple(
            column[0] if dim is None else torch.cat(column, dim) for column, dim in zip(columns, self.dims, strict=True)
        )

    def split_gradients(self, gradients: Gradients) -> list[Gradients]:
        """[slices] gradients of each, per differentiable tensor; None is zero."""
        dims = [self.dims[position] for position in self.whole.differentiable]
        columns = [
            (None,) * self.slices if gradient is None else self._parts(gradient, dim)
            for gradient, dim in zip(gradients, dims, strict=True)
        ]
        return [[column[number] for column in columns] for number in range(self.slices)]

    def join_gradients(self, parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Gradients of a microbatch, per differentiable tensor. One of all slices has the sum, in their order."""
        dims = [self.dims[position] for position in self.whole.differentiable]
        columns = zip(*parts, strict=True)
        return tuple(
            reduce(torch.add, column) if dim is None else torch.cat(column, dim)
            for column, dim in zip(columns, dims, strict=True)
        )

    def _parts(self, tensor: Tensor, dim: int | None) -> Sequence[Tensor]:
        return (tensor,) * self.slices if dim is None else tensor.tensor_split(self.slices, dim)


def _rows_of(whole: TensorSpec, part: TensorSpec, slices: int, names: Sequence[str]) -> int | None:
    """The dimension of the rows."""
    if whole.shape == part.shape and whole.dtype == part.dtype:
        return None
    dims = [dim for dim, (of_all, own) in enumerate(zip(whole.shape, part.shape, strict=False)) if of_all != own]
    fits = len(whole.shape) == len(part.shape) and whole.dtype == part.dtype and len(dims) == 1
    if not fits or whole.shape[dims[0]] != slices * part.shape[dims[0]]:
        raise PartitionError(
            f"a {whole} of a microbatch ({', '.join(names)}) is a {part} in one of {slices} slices",
            "leave `slices` out, or let every tensor between stages have the rows in one dimension",
        )
    return dims[0]


def check_outputs(boundary: SlicedBoundary) -> None:
    """Refuse what a stage gives for all rows together: no slice has its value. Raises `PartitionError`."""
    for spec, dim in zip(boundary.whole.tensors, boundary.dims, strict=True):
        if dim is None and spec.differentiable:
            raise PartitionError(
                f"a {spec} that depends on parameters leaves a stage in slices, and has no rows"
                f" ({', '.join(boundary.whole.names)})",
                "leave `slices` out of this stage; what is a mean or a sum over rows belongs into the loss function",
            )
