"""A forward that keeps nothing but where it began, so that it can be run once more with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedc_runtime.errors import StageError
from schedc_runtime.recompute.random_state import drawn_again, gpus, random_state


def save_nothing() -> AbstractContextManager[None]:
    """Around a forward of which autograd is to hold no tensor.

    Gradients stay switched on: layers may compute otherwise without, and the bits are to be those of the second time.
    """
    return saved_tensors_hooks(_let_go, _gone)


def _let_go(tensor: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise StageError("the backward of a forward that has kept nothing", "run it once more before")


class _Written(NamedTuple):
    """The buffers of a layer as they were, and how often they had been written to."""

    layer: nn.Module
    values: dict[str, Tensor]
    versions: int


@dataclass
class Checkpoint:
    """What a forward depends on beside its inputs and parameters. random: of the CPU, then of ``devices``."""

    random: Tensor
    devices: Sequence[torch.device]
    buffers: list[_Written]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around the same forward once more: of what it does to random numbers and buffers nothing is left behind.

        The forward may come in parts, each in a `restored` of its own: one goes on where the part before it ended.
        Buffers are put aside and not written over: graphs of other microbatches may hold them.
        """
        with drawn_again(self.random, self.devices):
            aside = [(layer, name, getattr(layer, name)) for layer, values, _ in self.buffers for name in values]
            for layer, values, _ in self.buffers:
                for name, value in values.items():
                    setattr(layer, name, value)
            try:
                yield
            finally:
                for layer, values, _ in self.buffers:
                    values.update({name: getattr(layer, name) for name in values})
                for layer, name, value in aside:
                    setattr(layer, name, value)
                self.random = random_state(self.devices)


class Checkpoints:
    """Those of the forwards of one stage.

    Copied are the buffers of layers that write to some of theirs, as batch norms do: all layers until it is seen that
    they do not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if next(layer.buffers(recurse=False), None) is not None]
        self._silent: set[tuple[int, bool]] = set()
        """Layers, by their number and whether they train, that were seen not to write."""

    def begin(self, device: torch.device) -> Checkpoint:
        """A forward begins. device: of its inputs."""
        devices = gpus([device])
        buffers = [
            _Written(layer, {name: value.clone() for name, value in layer.named_buffers(recurse=False)}, _writes(layer))
            for number, layer in enumerate(self._layers)
            if (number, layer.training) not in self._silent
        ]
        return Checkpoint(random_state(devices), devices, buffers)

    def end(self, checkpoint: Checkpoint) -> None:
        """It is over: copies of what it has not written to are let go of."""
        checkpoint.buffers = [written for written in checkpoint.buffers if _writes(written.layer) != written.versions]
        writing = {id(written.layer) for written in checkpoint.buffers}
        self._silent |= {
            (number, layer.training) for number, layer in enumerate(self._layers) if id(layer) not in writing
        }


def _writes(layer: nn.Module) -> int:
    return sum(buffer._version for buffer in layer.buffers(recurse=False))
