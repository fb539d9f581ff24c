"""Block masks of flex attention that a forward makes between its units: what they hold, and how they are made.

A block mask has a function of indices, with tensors in its closure such as the numbers of documents, and tables of
blocks that follow from it. In a recording the tables are operations as any others, and the function's values are one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

_MODULE = "torch.nn.attention.flex_attention"


@dataclass(frozen=True, slots=True)
class MaskFunction:
    """A function of indices (batch, head, query, key), whose closure may hold tensors."""

    function: Callable[..., Any]

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        leaves, spec, rest = sys.modules[_MODULE]._extract_callable_pytree(self.function)
        return leaves, (rest, spec)

    @classmethod
    def _unflatten(cls, leaves: tuple[Any, ...], rest: Any) -> MaskFunction:
        return cls(sys.modules[_MODULE]._reconstruct_closure_fn(rest[0], leaves, rest[1]))


def is_mask(value: Any) -> bool:
    """Whether a value is a block mask, or the function of one."""
    return isinstance(value, (MaskFunction, getattr(sys.modules.get(_MODULE), "BlockMask", MaskFunction)))


def opened(value: Any) -> tuple[tuple[Any, ...], Any]:
    """(leaves, the rest) of a mask, tensors in closures included."""
    leaves, rest = value._flatten()
    return leaves, rest


def leaf_of_mask(value: Any, number: int) -> Any:
    """One leaf of a mask."""
    return opened(value)[0][number]


def mask_values(mask: MaskFunction, *sizes: Any, **options: Any) -> Tensor:
    """[batch, heads, queries, keys] the values of a function."""
    values: Tensor = _plain("create_mask")(mask.function, *sizes, **options)
    return values


def dense_blocks(*tables: Any) -> Tensor:
    """[..., rows, columns] which blocks two tables [..., rows] and [..., rows, columns] name."""
    values: Tensor = _plain("_ordered_to_dense")(*tables)
    return values


def _plain(name: str) -> Callable[..., Any]:
    """A function of the module, not recorded."""
    function: Callable[..., Any] = inspect.unwrap(getattr(sys.modules[_MODULE], name))
    return function


def _told(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of a function, which a recorder sees between units."""
    seen = torch._C._len_torch_function_stack() > 0
    return handle_torch_function(function, (), *args, **options) if seen else function(*args, **options)


@contextmanager
def recorded_masks() -> Iterator[None]:
    """Makes what calls a function for each index, by torch's vmap, one operation for the recorder around it."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    plain = {name: getattr(module, name) for name in ("create_mask", "_ordered_to_dense")}

    def create_mask(function: Any, *sizes: Any, **options: Any) -> Any:
        return _told(mask_values, MaskFunction(function), *sizes, **options)

    def ordered_to_dense(*tables: Any) -> Any:
        return _told(dense_blocks, *tables)

    for name, recorded in (("create_mask", create_mask), ("_ordered_to_dense", ordered_to_dense)):
        setattr(module, name, update_wrapper(recorded, plain[name]))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(module, name, function)
