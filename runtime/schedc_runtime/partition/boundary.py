"""What crosses between two stages: tensor specs and constants, inferred from one microbatch's signature.

A program's messages have fixed shapes: both ends of a channel must know them before the first byte moves. Every rank
infers all boundaries by itself, with fake tensors through the whole model, without a message.

    whole [rows, ...] --split--> [rows / k, ...] of each slice --join--> whole

Which dimension has the rows follows from two recordings of the model: of a whole microbatch, and of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.errors import BoundaryError, PartitionError


class KnownValues(NamedTuple):
    """A fact about all values of a tensor: they are ``first``, or count from it along the last dimension.

    each: the values themselves, as nested lists; None where the fact above says them.
    """

    counting: bool
    first: int
    each: Any = None

    def tensor(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A real tensor of a shape, with the dtype and device of ``like``, which may be a fake."""
        if self.each is not None:
            return torch.tensor(self.each, dtype=like.dtype, device=like.device).reshape(tuple(shape))
        row = torch.arange(shape[-1], device=like.device) if self.counting else torch.zeros((), device=like.device)
        return (row + self.first).to(like.dtype).expand(tuple(shape)).contiguous()


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that crosses.

    differentiable: a gradient comes back, because the tensor has a floating type and depends on a parameter. Frozen
    parameters count too, so that freezing does not change the messages. known: what is known of the values of an
    argument, see `values`. rows: dimension of an argument that has the rows; None if all microbatches share it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False
    known: KnownValues | None = field(default=None, compare=False, repr=False)
    rows: int | None = field(default=0, compare=False, repr=False)

    @property
    def form(self) -> tuple[torch.dtype, bool]:
        """What does not change with the sizes of a batch."""
        return self.dtype, self.differentiable

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Constant:
    """A value that is the same for every microbatch of the signature, such as a size, a flag or None. Never sent."""

    value: Any


@dataclass(frozen=True)
class Boundary:
    """The values between stage k - 1 and stage k, flattened: every leaf is a `TensorSpec` or a `Constant`.

    Boundary 0 is the model's input, and the last one its output. names: of the values in the traced model.
    """

    entries: tuple[TensorSpec | Constant, ...]
    tree: pytree.TreeSpec
    names: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of an ACTIVATION message over this boundary, in order."""
        return tuple(entry for entry in self.entries if isinstance(entry, TensorSpec))

    @cached_property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """The gradients of a GRADIENT message over this boundary, in order: one per differentiable tensor."""
        return tuple(spec for spec in self.tensors if spec.differentiable)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Positions in `tensors` that have a gradient, ascending."""
        return tuple(i for i, spec in enumerate(self.tensors) if spec.differentiable)

    @cached_property
    def mixed(self) -> bool:
        """Whether a tensor has no gradient."""
        return len(self.differentiable) != len(self.tensors)

    @cached_property
    def flat(self) -> bool:
        """Whether the values are a plain tuple of tensors, without constants: the usual, fast case."""
        return len(self.tensors) == len(self.entries) and self.tree == pytree.tree_structure((0,) * len(self.tensors))

    @cached_property
    def lone(self) -> bool:
        """Whether the value is one tensor by itself, as the output of most models is."""
        return self.tree == pytree.tree_structure(0) and len(self.tensors) == 1

    def pack(self, values: Any) -> tuple[Tensor, ...]:
        """The tensors of ``values``, in order. Checks their number; the transport checks shapes."""
        if self.flat and type(values) is tuple and len(values) == len(self.entries):
            return values
        if self.lone and type(values) is Tensor:
            return (values,)
        leaves = pytree.tree_leaves(values)
        if len(leaves) != len(self.entries):
            raise BoundaryError(
                f"{len(leaves)} values where {len(self.entries)} were expected ({', '.join(self.names)})"
            )
        return tuple(leaf for leaf, entry in zip(leaves, self.entries, strict=True) if isinstance(entry, TensorSpec))

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """The values, from tensors in the shapes of `tensors`: the inverse of `pack`, with the constants put back."""
        if self.flat:
            return tuple(tensors)
        rest = iter(tensors)
        leaves = [entry.value if isinstance(entry, Constant) else next(rest) for entry in self.entries]
        return pytree.tree_unflatten(leaves, self.tree)


class Recordable(Protocol):
    """A partitioned model."""

    def select(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Boundary, ...]: ...


def infer_boundaries(
    partition: Recordable, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Boundary, ...]:
    """[stages + 1] the boundaries of one microbatch: entry k is the input of stage k, the last is the model's output.

    args, kwargs: arguments of the model's forward for ONE microbatch; a `TensorSpec` may replace a tensor. This takes
    no memory and computes nothing; parameters may be on the meta device. The result depends only on shapes, dtypes and
    values that are no tensors. Every rank therefore gets the same result. The stages run the code for these arguments
    from now on.
    """
    return partition.select(args, kwargs or {})


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
