"""Reads what autograd has saved in a node, before a backward frees it: plain tensors, and those behind hooks.

A saved tensor may lie behind a hook. A region of ours recomputes it, checkpointing of torch recomputes it, and a user's
hook brings it back from elsewhere. The first two are unpacked when the backward comes by, which recomputes them anyway.
A user's hook is unpacked by W: what lies on the host stays there until then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from schedc_runtime.recompute.regions import NOTES


class Packed(NamedTuple):
    """A tensor [...] behind a hook. in_backward: whether it is to be unpacked while the backward runs."""

    unpack: Callable[[Any], Tensor]
    data: Any
    in_backward: bool

    def value(self) -> Tensor:
        """The tensor, in the shape that autograd saved."""
        return self.unpack(self.data).detach()


class _ReadTwice(dict[Any, Any]):
    """The handles of a checkpoint's tensor that outlast one unpacking: the node of the graph unpacks it as well."""

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(group, handle)


class SavedName(NamedTuple):
    """Where a node keeps a saved tensor.

    name: a node of torch has ``_saved_NAME``; for a user's function it is the number among its saved tensors.
    raw, attribute: the node's attributes with the tensor as autograd holds it, and with the tensor itself.
    """

    name: str | int
    raw: str
    attribute: str


def saved_name(name: str | int) -> SavedName:
    """Where a node keeps the tensor that it saved under ``name``."""
    if isinstance(name, int):
        return SavedName(name, "_raw_saved_tensors", "saved_tensors")
    return SavedName(name, f"_raw_saved_{name}", f"_saved_{name}")


def saved_tensor(node: Any, where: SavedName) -> Tensor | Packed | None:
    """The tensor [...] that ``node`` saved, detached from its graph; None if it saved none."""
    name, raw_attribute, attribute = where
    raw = getattr(node, raw_attribute, None)
    if raw is None:
        return None
    if type(name) is int:
        raw = raw[name]
    unpack = raw.unpack_hook
    if unpack is None:
        tensor = getattr(node, attribute)
        if type(name) is int:
            tensor = tensor[name]
        return None if tensor is None else tensor.detach()
    data = raw.data
    if is_checkpointed(data):
        data.handles = _ReadTwice(data.handles)
        return Packed(unpack, data, in_backward=True)
    return Packed(unpack, data, in_backward=isinstance(data, NOTES))


def is_checkpointed(data: Any) -> bool:
    """Whether ``data`` is what non-reentrant checkpointing keeps in place of a tensor."""
    return type(data).__name__ == "_Holder" and isinstance(getattr(data, "handles", None), dict)


def hooked(node: Any) -> bool:
    """Whether a node has a saved tensor behind a hook."""
    raws = [getattr(node, name) for name in _raw_names(node.__class__)]
    return any(raw is not None and raw.unpack_hook is not None for group in raws for raw in _listed(group))


@cache
def _raw_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _listed(raw: Any) -> tuple[Any, ...]:
    return tuple(raw) if isinstance(raw, (tuple, list)) else (raw,)


def recomputed_once() -> AbstractContextManager[Any]:
    """Wraps a backward and what is unpacked right behind it: checkpointed regions are repeated once, and not twice."""
    return nullcontext() if GraphExecGroup._get_current_group() is not None else GraphExecGroup()
