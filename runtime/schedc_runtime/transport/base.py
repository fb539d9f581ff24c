"""The protocol of a transport: post a batch of sends and receives, ask whether they are ready, wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Handle = Any
"""A pending transfer, as `Transport.post` returns it. Once it is complete, it has the ``tensors`` of the message."""


Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a message."""

Tensors = tuple[Tensor, ...]


class Transfer(NamedTuple):
    """One message: the tensors of one stage boundary for one microbatch, to or from one rank.

    peer: the other rank, on the pipeline axis.
    tensors: in the shapes of the boundary's specs; empty for a receive whose tensors the transport makes by ``form``.
    receive: True if ``tensors`` are buffers to fill, False if they are to be sent. Before `wait`, tensors to be sent
        must not change and buffers must not be read.
    communicator: number of the communicator of a program that carries it; -1: that of all other transfers.
    form: what the tensors have been checked against, or are made by; None for tensors of the caller alone.
    """

    peer: int
    receive: bool
    tensors: Tensors
    communicator: int = -1
    form: MessageForm | None = None


class Transport(Protocol):
    """One rank's end of the network.

    On a communicator, every ordered pair of ranks is a channel without tags, because NCCL ignores tags: the n-th send
    meets the n-th receive. A send completes together with its receive, as with gloo (rendezvous at every size).
    """

    rank: int
    cooperative: bool
    """True if `wait` cannot block: the caller must come back later until `ready` is true, and the transfer complete.

    Such a transport makes the tensors of a receive when they arrive. Other transports want buffers from the first.
    """

    def post(self, batch: Sequence[Transfer]) -> list[Handle]:
        """Start all transfers of a batch at once. Returns a handle for each, in order."""
        ...

    def ready(self, handle: Handle) -> bool:
        """Whether `wait` would return without giving control to another rank."""
        ...

    def wait(self, handle: Handle) -> None:
        """Block until the transfer is complete."""
        ...

    def close(self) -> None:
        """Close the connections. Nothing can be posted afterwards."""
        ...


class TransportError(Exception):
    """The network failed: a connection closed, or a wait took too long. Often the echo of another rank's failure."""

    @property
    def timed_out(self) -> bool:
        """Whether a wait took too long. "Connection timed out" is not such a wait: the system gave up a connection."""
        text = str(self).lower().replace("connection timed out", "")
        return "timed out" in text or "timeout" in text


class MessageMismatch(Exception):
    """A tensor differs from its spec in the boundary between two stages."""


class MessageForm:
    """What the messages over one boundary carry. specs: [tensors] shape and dtype of each."""

    __slots__ = ("_device", "_lone", "_makers", "specs")

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self._lone = self.specs[0] if len(self.specs) == 1 else ((), None)
        """The spec of a single tensor, the usual, fast case."""
        self._device: torch.device | None = None
        self._makers: list[Callable[[], Tensor]] = []

    def buffers(self, device: torch.device) -> Tensors:
        """New tensors to receive into, of the shapes of the specs. A stage keeps its inputs until the backward."""
        if device is not self._device:
            self._device = device
            # `torch.empty` takes half as long again.
            self._makers = [
                partial(torch.empty_strided, shape, _strides(shape), dtype=dtype, device=device)
                for shape, dtype in self.specs
            ]
        return tuple([make() for make in self._makers])

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise `MessageMismatch`, naming both sides, unless every tensor has the shape and dtype of its spec.

        Call this before a message is sent. With gloo, a receive buffer that is too small aborts the receiving process.
        One that is too large is silently left half filled.
        """
        shape, dtype = self._lone
        if dtype is not None and len(tensors) == 1 and tensors[0].dtype is dtype and tensors[0].shape == shape:
            return
        if len(tensors) != len(self.specs):
            raise MessageMismatch(f"{len(tensors)} tensors to send where the boundary has {len(self.specs)}")
        for position, (shape, dtype) in enumerate(self.specs):
            tensor = tensors[position]
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise MessageMismatch(
                    f"tensor {position} to send is {describe(tensor.shape, tensor.dtype)}, "
                    f"but the boundary says {describe(shape, dtype)}"
                )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps[: len(shape)]))


def describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A shape and dtype as error messages print them: ``float32[4, 16]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
