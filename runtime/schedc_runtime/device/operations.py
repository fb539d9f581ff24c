"""Facts about operations of torch: which need values on the host, which draw, and which arguments are written."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from schedc_runtime.device.rule_calls import name_of

ASKING = frozenset({
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "_unique2", "unique_dim",
    "unique_consecutive", "is_nonzero", "equal",
})  # fmt: skip
"""Operations whose result needs values on the host."""
ON_HOST = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__})
"""Methods by which the host reads a tensor, on a CPU without an operation."""
_MASKED = frozenset({"index", "index_put", "index_put_"})


@cache
def _defaults(func: Any) -> dict[str, Any]:
    return {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}


@cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(each.name for each in func._schema.arguments)


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were left out."""
    return _defaults(func) | dict(zip(_names(func), args, strict=False)) | kwargs


def asks(func: Any, arguments: dict[str, Any]) -> bool:
    """Whether an operation needs values on the host. arguments: as of `arguments_of`."""
    name = name_of(func)
    if name in _MASKED:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in arguments["indices"])
    return name in ASKING or (name == "repeat_interleave" and arguments.get("output_size") is None)


def draws_numbers(func: Any, arguments: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. arguments: as of `arguments_of`."""
    return torch.Tag.nondeterministic_seeded in func.tags and arguments.get("dropout_p", 1.0) != 0.0


@cache
def writes_of(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operation writes."""
    listed = enumerate(func._schema.arguments)
    return tuple((n, x.name) for n, x in listed if x.alias_info is not None and x.alias_info.is_write)
