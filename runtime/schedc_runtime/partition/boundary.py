"""Infers what crosses between two stages, tensor specs and constants, from one microbatch's signature.

A program's messages have fixed shapes: both ends of a channel must know them before the first byte moves. Every rank
infers all boundaries by itself, with fake tensors through all stages, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from schedc_runtime.errors import BoundaryError
from schedc_runtime.partition.stage_modules import StageModules


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that crosses.

    differentiable: a gradient comes back, because the tensor has a floating type and depends on a parameter. Frozen
    parameters count too, so that freezing does not change the messages.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False

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
        return len(self.tensors) == len(self.entries) == self.tree.num_children and self.tree.type is tuple

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


def infer_boundaries(
    partition: StageModules, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Boundary, ...]:
    """[stages + 1] the boundaries of one microbatch: entry k is the input of stage k, the last is the model's output.

    args, kwargs: arguments of the model's forward for ONE microbatch; a `TensorSpec` may replace a tensor. This takes
    no memory and computes nothing; parameters may be on the meta device. The result depends only on shapes, dtypes and
    values that are no tensors. Every rank therefore gets the same result.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device(partition.modules)
    with mode, torch.enable_grad():
        values = pytree.tree_map(lambda leaf: _fake(leaf, device), partition.bind(args, kwargs or {}))
        boundaries = [_boundary(values, partition.inputs)]
        for index, module in enumerate(partition.modules):
            values = _propagate(module, index, values, device)
            names = partition.values[index] if index + 1 < len(partition.modules) else ("output",)
            boundaries.append(_boundary(values, names))
    return tuple(boundaries)


def _propagate(module: nn.Module, index: int, values: Any, device: torch.device) -> Any:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    fakes = {
        name: torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device,
            requires_grad=isinstance(value, nn.Parameter) and _can_differ(value.dtype),
        )
        for name, value in named
    }  # fmt: skip
    shape_only = getattr(module, "shape_only", None)
    try:
        if shape_only is not None:
            module.shape_only = True  # type: ignore[assignment]
        return torch.func.functional_call(module, fakes, tuple(values), tie_weights=False)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise BoundaryError(
            f"stage {index}: what it computes depends on the values of its input ({error}), so that the shape of its"
            " output cannot be inferred in advance",
            "keep data-dependent shapes inside one block, give that block's output a fixed shape, and count tokens"
            " with one_hot(...).sum(0) rather than bincount",
        ) from error
    except Exception as error:
        shapes = ", ".join(
            str(TensorSpec.of(v)) if isinstance(v, Tensor) else repr(v) for v in pytree.tree_leaves(values)
        )
        raise BoundaryError(
            f"stage {index} fails on inputs of the shapes ({shapes}): {type(error).__name__}: {error}",
            "if the whole model fails on such a microbatch too, mend the sizes of the batch or the model; if only here,"
            " an operation cannot run on fake tensors: keep values out of control flow",
        ) from error
    finally:
        if shape_only is not None:
            module.shape_only = shape_only


def _boundary(values: Any, names: tuple[str, ...]) -> Boundary:
    leaves, tree = pytree.tree_flatten(values)
    entries = tuple(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves)
    return Boundary(entries, tree, names)


def _fake(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, (Tensor, TensorSpec)):
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=device)
    return leaf


def _device(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the parameters that are not on the meta device; the CPU if all are."""
    real = (p.device for module in modules for p in module.parameters() if p.device.type != "meta")
    return next(real, torch.device("cpu"))


def _can_differ(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
