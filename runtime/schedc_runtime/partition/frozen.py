"""Compares values of Python by what they hold: a value is frozen when it is read, and compared with a later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import date, timedelta
from enum import Enum
from functools import partial
from hashlib import blake2b
from numbers import Number
from operator import is_
from pathlib import PurePath
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGE = 1024
"""A container, or an array of numpy, with more items is compared by identity alone."""
_DEPTH = 6
PLAIN: Final = (
    Number, str, bytes, type(None), type(...), frozenset, slice, range, Enum, date, timedelta, PurePath,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
"""Classes whose values do not change, and are compared by their value."""


class _Missing:
    """An attribute or a key that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Final = _Missing()


class Contents(NamedTuple):
    """A container as it was, or a tensor [...] with its dtype. keys: empty for containers without keys."""

    kind: type
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


class Shallow(NamedTuple):
    """A container beside its former contents. It is the same as long as it holds the same objects."""

    container: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def holds(self) -> bool:
        """Whether the container still has its former keys and values, by identity."""
        now = contents(self.container)
        if now is None or len(now[1]) != len(self.values):
            return False
        return all(map(is_, now[1], self.values)) and all(map(is_, now[0], self.keys))


def contents(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """(keys, items) of a container that can be compared by its items; None for everything else."""
    if isinstance(value, dict):
        return (tuple(value), tuple(dict.values(value))) if len(value) <= LARGE else None
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        return ((), tuple(value)) if len(value) <= LARGE else None
    if isinstance(value, MappingProxyType):
        return contents(dict(value))
    if isinstance(value, SimpleNamespace):
        return contents(vars(value))
    if isinstance(value, partial):
        return (), (value.func, value.args, value.keywords)
    return None


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """What `same_value` compares later: the value itself, or its contents where these may change."""
    if isinstance(value, Tensor):
        return Contents(Tensor, (value,), (value.dtype,))
    if isinstance(value, set):
        return Contents(set, (), (frozenset(value),))
    if isinstance(value, np.ndarray) and value.size <= LARGE and not value.dtype.hasobject:
        return Contents(np.ndarray, (value.shape, str(value.dtype)), (value.tobytes(),))
    if isinstance(value, PLAIN) or depth == 0 or (inner := contents(value)) is None:
        return value
    keys, values = inner
    return Contents(type(value), keys, tuple([frozen(item, depth - 1) for item in values]))


def same_value(before: Any, now: Any) -> bool:
    """Whether two frozen values are one object, or equal numbers, strings, ... in containers of one class."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple) and not isinstance(before, PLAIN):  # `Contents`, and the keys in it
        return len(before) == len(now) and all(map(same_value, before, now))
    return isinstance(before, PLAIN) and bool(before == now or (before != before and now != now))


def shallow(value: Any, depth: int = _DEPTH) -> Iterator[Shallow | Tensor | Any]:
    """The containers, tensors [...], sets and arrays in a value: identity alone does not show their changes."""
    if isinstance(value, (Tensor, set, np.ndarray)):
        yield value
    elif not isinstance(value, PLAIN) and depth and (inner := contents(value)) is not None:
        if not isinstance(value, (tuple, partial)):
            yield Shallow(value, *inner)
        for item in inner[1]:
            yield from shallow(item, depth - 1)


def shown_value(value: Any) -> str:
    """A frozen value in words that are equal on two ranks where the values are."""
    if isinstance(value, Contents):
        if value.kind is Tensor:
            (tensor,) = value.keys
            return f"a tensor {list(tensor.shape)} of {value.values[0]}{_digest(tensor)}"
        names = (
            [f"{key!r}: " for key in value.keys] if len(value.keys) == len(value.values) else [""] * len(value.values)
        )
        items = [name + shown_value(item) for name, item in zip(names, value.values, strict=True)]
        return f"{value.kind.__name__}({', '.join(items)})"
    if value is MISSING or isinstance(value, PLAIN):
        return repr(value)
    named = getattr(value, "__qualname__", None)
    return f"`{named}`" if isinstance(named, str) else f"another {type(value).__name__}"


def _digest(tensor: Tensor) -> str:
    """Digest of the values of a small tensor [...]."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.is_meta or tensor.numel() > LARGE:
        return ""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f" with digest {blake2b(values, digest_size=4).hexdigest()}"
