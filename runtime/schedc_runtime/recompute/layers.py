"""Forwards that take the place of those of a module's parts: they say the number of a layer, or make a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


def unmark_layers(module: nn.Module) -> None:
    """Undo `layer_levels.mark_layers`."""
    restore_forwards(module, LayerForward)


class ReplacedForward:
    """A module's replaced forward. An object and not a closure: a deep copy of the module copies it too.

    call: calls the forward, given first, on arguments by position.
    inner: runs in place of the forward of the module's class; None for that one.
    """

    def __init__(self, part: nn.Module, call: Callable[..., Any], inner: Any) -> None:
        self.part, self.call, self.inner = part, call, inner

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward, own = (type(self.part).forward, (self.part,)) if self.inner is None else (self.inner, ())
        if not options:
            return self.call(forward, *own, *args)
        return self.call(_WithOptions(forward, tuple(options)), *own, *args, *options.values())


class _WithOptions(NamedTuple):
    """A forward whose last arguments are its options ``names``: tensors among them are arguments of the region."""

    forward: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        first = len(args) - len(self.names)
        return self.forward(*args[:first], **dict(zip(self.names, args[first:], strict=True)))


def restore_forwards(module: nn.Module, kind: type[ReplacedForward]) -> None:
    """Give the parts of ``module`` back what forwards of this kind have replaced."""
    for part in module.modules():
        if isinstance(replaced := part.__dict__.get("forward"), kind):
            del part.__dict__["forward"]
            if replaced.inner is not None:
                part.__dict__["forward"] = replaced.inner


class LayerForward(ReplacedForward):
    """Says the number of the layer."""
