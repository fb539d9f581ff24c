"""What an executor needs of a transport: post a batch of sends and receives, ask, wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Handle = Any
"""What `Transport.post` returns for one transfer; opaque to everyone else."""


Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a message."""


class Transfer(NamedTuple):
    """One message: the tensors of one stage boundary for one microbatch, to or from one rank.

    peer: the other rank, on the pipeline axis.
    receive: True if ``tensors`` are buffers to be filled, False if they are to be sent. Tensors that are being
        sent must not change, and buffers must not be read, before the handle has been waited for.
    """

    peer: int
    receive: bool
    tensors: tuple[Tensor, ...]


class Transport(Protocol):
    """One rank's end of the network.

    Every ordered pair of ranks is a channel without tags: the n-th send meets the n-th receive (NCCL ignores tags,
    so none are relied on). A send is complete when its receive is, as with gloo (rendezvous at every size).
    """

    rank: int
    cooperative: bool
    """True if `wait` cannot block: the caller must come back later as long as `ready` says no."""

    def post(self, batch: Sequence[Transfer]) -> list[Handle]:
        """Start all transfers of a batch at once; a handle for each, in order."""
        ...

    def ready(self, handle: Handle) -> bool:
        """Whether `wait` would return without giving control to another rank."""
        ...

    def wait(self, handle: Handle) -> None:
        """Block until the transfer is complete."""
        ...

    def close(self) -> None:
        """Let go of the connections. Nothing can be posted afterwards."""
        ...


class TransportError(Exception):
    """The network failed: a connection closed, or a wait that took too long. Often not the cause but its echo."""

    @property
    def timed_out(self) -> bool:
        """Whether a wait took too long. A connection that the system gave up ("Connection timed out") has broken."""
        text = str(self).lower().replace("connection timed out", "")
        return "timed out" in text or "timeout" in text


class MessageMismatch(Exception):
    """A tensor is not what the boundary between two stages says it is."""


def check_tensors(tensors: Sequence[Tensor], specs: Sequence[Spec]) -> None:
    """Raise `MessageMismatch`, naming both sides, unless every tensor has the shape and dtype of its spec.

    Runs before a message is sent: with gloo, a receive buffer that is too small aborts the receiving process and one
    that is too large is silently left half filled.
    """
    if len(tensors) != len(specs):
        raise MessageMismatch(f"{len(tensors)} tensors to send where the boundary has {len(specs)}")
    for position, (tensor, (shape, dtype)) in enumerate(zip(tensors, specs, strict=True)):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise MessageMismatch(
                f"tensor {position} to send is {describe(tensor.shape, tensor.dtype)}, "
                f"but the boundary says {describe(shape, dtype)}"
            )


def describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A shape and dtype as messages print them: ``float32[4, 16]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
