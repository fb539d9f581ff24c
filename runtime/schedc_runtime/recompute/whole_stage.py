"""A forward that saves only a checkpoint of its start, from which it runs a second time with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedc_runtime.errors import StageError
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.recompute.random_state import drawn_again, gpus, random_state


def save_nothing() -> AbstractContextManager[None]:
    """Wraps a forward of which autograd holds no tensor.

    Gradients stay on: without them layers may compute differently, and both runs must give the same bits.
    """
    return saved_tensors_hooks(_drop, _missing)


def _drop(tensor: Tensor) -> None:
    return None


def _missing(_: None) -> Tensor:
    raise StageError("the backward of a forward that saved nothing", "recompute the forward before it")


class _Written(NamedTuple):
    """The buffers of a layer before the forward. versions: how often they had been written to."""

    layer: nn.Module
    values: dict[str, Tensor]
    versions: int


@dataclass
class Checkpoint:
    """What a forward depends on besides its inputs and parameters.

    random: [bytes] states of the generators of the CPU and of ``devices``. None if numbers are by name: the second run
    then sets the same keys. buffers: the buffers that the forward writes to.
    """

    random: Tensor | None
    devices: Sequence[torch.device]
    buffers: list[_Written]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Wraps a second run of the forward. Afterwards random numbers and buffers are as before.

        The forward may run in parts, each in a `restored` of its own: a part continues where the one before ended.
        Buffers are exchanged and not overwritten, because graphs of other microbatches may hold them.
        """
        with nullcontext() if self.random is None else drawn_again(self.random, self.devices):
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
                if self.random is not None:
                    self.random = random_state(self.devices)


class StageCheckpoints:
    """Makes the checkpoints of the forwards of one stage.

    A checkpoint copies the buffers of layers that write to some of theirs, as batch norms do. It copies those of every
    layer until a forward shows that the layer does not write.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if next(layer.buffers(recurse=False), None) is not None]
        self._silent: set[tuple[int, bool]] = set()
        """(number of a layer, whether it trains) of layers that wrote to no buffer."""

    def begin(self, device: torch.device) -> Checkpoint:
        """A checkpoint of a forward that begins now. device: the device of its inputs."""
        devices = gpus([device])
        buffers = [
            _Written(layer, {name: value.clone() for name, value in layer.named_buffers(recurse=False)}, _writes(layer))
            for number, layer in enumerate(self._layers)
            if (number, layer.training) not in self._silent
        ]
        return Checkpoint(random_state(devices) if session() is None else None, devices, buffers)

    def end(self, checkpoint: Checkpoint) -> None:
        """The forward is over: free the copies of buffers that it did not write to."""
        checkpoint.buffers = [written for written in checkpoint.buffers if _writes(written.layer) != written.versions]
        writing = {id(written.layer) for written in checkpoint.buffers}
        self._silent |= {
            (number, layer.training) for number, layer in enumerate(self._layers) if id(layer) not in writing
        }


def _writes(layer: nn.Module) -> int:
    return sum(buffer._version for buffer in layer.buffers(recurse=False))
