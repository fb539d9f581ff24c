"""Tells regions which layer of their stage they are in, where the layers of a stage have levels of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from schedc_runtime.errors import StageError
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.recompute.regions import within_layer


def mark_layers(module: nn.Module, blocks: Sequence[str], said: int, stage: int) -> None:
    """Let the modules of a stage's layers say the number of their layer when they run. `unmark_layers` undoes it.

    blocks: paths, in ``module``, of the stage's blocks in order. Parts of the model that hold an exchange and lie in no
    block, as predictions do, are layers behind them. said: number of layers that have a level. stage: its number, for
    errors. Raises `StageError` where the stage has fewer layers.
    """
    layers = [*blocks, *_beside(module, blocks)]
    if said > len(layers):
        raise StageError(
            f"stage {stage}: the plan has levels of {said} layers, and the model has {len(layers)} there",
            "say the model's layers in the plan: levels are given from the stage's first layer on",
        )
    for number, path in enumerate(layers):
        for part in called_parts(module.get_submodule(path)):
            part.__dict__["forward"] = LayerForward(part, partial(within_layer, number), part.__dict__.get("forward"))


def unmark_layers(module: nn.Module) -> None:
    """Undo `mark_layers`."""
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


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the segments of a block call: those between its exchanges, or the block itself."""
    if isinstance(module, Exchange):
        return
    if not any(isinstance(part, Exchange) for part in module.modules()):
        yield module
        return
    for part in module.children():
        yield from called_parts(part)


def _beside(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The outermost parts with an exchange that hold no block and lie in none."""
    return [
        name
        for name, part in module.named_children()
        if any(isinstance(inner, Exchange) for inner in part.modules())
        and not any(f"{block}.".startswith(f"{name}.") for block in blocks)
    ]
