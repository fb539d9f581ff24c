"""Values of tensors that follow from no tensor of the model or the batch: tables of positions, masks, zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from schedc_runtime.row_flow.table import FRESH

_MOST = 1 << 22
"""Elements of the largest tensor whose values are computed."""
_DENSE = 1 << 16
"""Elements of the largest tensor of one value that is written out."""
_FILLS = {"zeros": 0, "ones": 1, "empty": 0, "new_zeros": 0, "new_ones": 1, "new_empty": 0, "zeros_like": 0,
          "ones_like": 1, "empty_like": 0, "empty_strided": 0, "new_empty_strided": 0, "empty_permuted": 0,
          "full": None, "new_full": None, "full_like": None}  # fmt: skip
"""Operators that give one value; None: it is their argument ``fill_value``."""


def known_of(tensor: Tensor) -> Tensor | None:
    """[...] the values of a tensor that is no fake, on the CPU."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > _MOST:
        return None
    with _disable_current_modes():
        return tensor.detach().cpu()


def computed(
    function: torch._ops.OpOverload, name: str, given: Mapping[str, Any], args: Sequence[Any],
    kwargs: Mapping[str, Any], known: Callable[[Tensor], Tensor | None], results: Sequence[Tensor],
) -> list[Tensor] | None:  # fmt: skip
    """[results] the values that an operator gives; None where they are not known. A write is done to known values.

    known: the values of an argument.
    """
    if name in ("randperm", "randint", "rand", "randn") or torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if any(result.numel() > _MOST and name not in _FILLS for result in results):
        return None
    with _disable_current_modes():
        if name in _FILLS:
            value = given["fill_value"] if _FILLS[name] is None else _FILLS[name]
            return [_filled(result, value) for result in results]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in FRESH and not tensors:
            return None
        if any(known(tensor) is None for tensor in tensors):
            return None
        real = pytree.tree_map(lambda leaf: _real(leaf, known), (tuple(args), dict(kwargs)))
        try:
            with torch.no_grad():
                given_back = function(*real[0], **real[1])
        except Exception:
            return None
        return [leaf for leaf in pytree.tree_leaves(given_back) if isinstance(leaf, Tensor)]


def _filled(like: Tensor, value: Any) -> Tensor:
    filled = torch.full((), value, dtype=like.dtype, device="cpu").expand(like.shape)
    return filled.clone(memory_format=torch.contiguous_format) if filled.numel() <= _DENSE else filled


def _real(leaf: Any, known: Callable[[Tensor], Tensor | None]) -> Any:
    if isinstance(leaf, Tensor):
        return known(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
