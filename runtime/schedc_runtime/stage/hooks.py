"""Tells which nodes of a graph can have hooks, and sets parameters' hooks aside.

Autograd does not say whether a node has hooks. torch numbers each hook that Python code registers, and each node. A
node that was made after a mark has no hook if none was registered since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from schedc_runtime.stage.graph import Node

NEVER = 1 << 64
"""A number that no node has."""


class HookMark(NamedTuple):
    """A moment. hooks: hooks registered until then. node: sequence number of the next node of this thread."""

    hooks: int
    node: int


class OwnHooks:
    """The hooks that this file has registered. They are on nodes of its own choice, and change no gradient."""

    hooks = 0


def hook_mark() -> HookMark:
    """This moment. It is taken in front of a forward, in its thread."""
    return HookMark(RemovableHandle.next_id - OwnHooks.hooks, torch._C._autograd._get_sequence_nr())


def unhooked_from(mark: HookMark | None) -> int:
    """The sequence number from which on nodes have no hooks; `NEVER` if a hook came since ``mark``, or without one."""
    return mark.node if mark is not None and RemovableHandle.next_id - OwnHooks.hooks == mark.hooks else NEVER


def before_node(node: Node, take: Callable[[Any], None]) -> None:
    """Call ``take`` with the gradients of the outputs of ``node`` before it runs, behind the hooks that it has."""
    node.register_prehook(take)
    OwnHooks.hooks += 1


def hooks_of(node: Node) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks of a node, before and behind it, as torch keeps them: what Python code registers later comes in."""
    mappings = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        mappings.append(handle.hooks_dict_ref())
        handle.remove()
        OwnHooks.hooks += 1
    before, behind = mappings
    return before, behind


def _nothing(*_: Any) -> None:
    """A hook that changes nothing."""


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter, of any shape, has hooks: of its gradient, or behind the addition."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextmanager
def without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Empties the hooks of the parameters' gradients for a while. parameters: of any shape."""
    aside = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            hooks.update(before)
