"""What crosses between two stages: tensor specs and constants, inferred from one microbatch's signature.

A program's messages have fixed shapes: both ends of a channel must know them before the first byte moves. Every rank
infers all boundaries by itself, with fake tensors through the whole model, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.errors import BoundaryError
from schedc_runtime.partition.known_values import KnownValues


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
    def _flat(self) -> bool:
        """Whether the values are a plain tuple of tensors, without constants: the usual, fast case."""
        return len(self.tensors) == len(self.entries) and self.tree == pytree.tree_structure((0,) * len(self.tensors))

    def pack(self, values: Any) -> tuple[Tensor, ...]:
        """The tensors of ``values``, in order. Checks their number; the transport checks shapes."""
        leaves = values if self._flat and type(values) is tuple else pytree.tree_leaves(values)
        if len(leaves) != len(self.entries):
            raise BoundaryError(
                f"{len(leaves)} values where {len(self.entries)} were expected ({', '.join(self.names)})"
            )
        if self._flat:
            return tuple(leaves)
        return tuple(leaf for leaf, entry in zip(leaves, self.entries, strict=True) if isinstance(entry, TensorSpec))

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """The values, from tensors in the shapes of `tensors`: the inverse of `pack`, with the constants put back."""
        if self._flat:
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
