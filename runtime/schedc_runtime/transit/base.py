"""What a library of expert exchanges gives: a `Transit`, which packs rows by itself and brings them there and back.

    plan            ids [N, k] --> its own plan of the rows
    dispatch        tokens [N, H], weights [N, k] --> rows by expert [P, H], gates [P], ends [E]
    combine         results [P, H] --> sums [N, H]

The gradient of a dispatch is the combine of its gradients by the same handle, and the other way round. Its
properties are `CarrierFacts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from schedc_runtime.device.base import DeviceEvent
from schedc_runtime.moe.carrier_facts import CarrierFacts
from schedc_runtime.moe.counts import Shape
from schedc_runtime.providers import Bits
from schedc_runtime.ranks.expert_group import ExpertGroup


class Flight(NamedTuple):
    """Rows on their way.

    done: an event behind their arrival. The runtime lets compute wait for it before it calls the finish.
    payload: what the finish needs. ready: whether `done` can be waited for without another rank of this process.
    """

    done: DeviceEvent
    payload: Any
    ready: Callable[[], bool] = lambda: True


class Arrived(NamedTuple):
    """Rows at their experts.

    rows: [P, H] by expert. gates: [P] their weights; None where a handle said the way. ends: [E] int32 on the device of
    the rows, where the rows of each expert here end. Rows behind the last end belong to nobody. handle: the way, for
    combines and for further dispatches.
    """

    rows: Tensor
    gates: Tensor | None
    ends: Tensor
    handle: Any


class Transit(Protocol):
    """One rank's end of a library of expert exchanges. All ranks of a group make the same calls in the same order.

    Every start gets an event ``after`` of compute: the library's streams wait for it before they read the tensors.
    Tensors that a stream of its own reads are announced to the allocator (`ComputeDevice.used_by`).
    """

    @property
    def facts(self) -> CarrierFacts: ...

    def plan(self, ids: Tensor, shape: Shape) -> Any:
        """The plan of a microbatch from the choices ids [N, k] int64 of this rank; -1 is no choice."""
        ...

    def start_dispatch(
        self, rows: Tensor, weights: Tensor | None, plan: Any, after: DeviceEvent, handle: Any = None
    ) -> Flight:
        """Send rows [N, H] and weights [N, k] to the experts. handle: take this way again, without weights."""
        ...

    def finish_dispatch(self, flight: Flight) -> Arrived: ...

    def start_combine(self, rows: Tensor, handle: Any, after: DeviceEvent, gates: Tensor | None = None) -> Flight:
        """Send results [P, H] back, with gradients of their gates [P] where these are given."""
        ...

    def finish_combine(self, flight: Flight) -> tuple[Tensor, Tensor | None]:
        """Sums [N, H] of the results, and the gates' gradients [N, k] where they were given."""
        ...


class ExchangeCase(NamedTuple):
    """What a transit is chosen by.

    width: columns of a row. experts: of all ranks. top: choices of a token. processes: whether each rank is a process.
    """

    device: torch.device
    dtype: torch.dtype
    width: int
    experts: int
    top: int
    ranks: int
    nodes: int
    processes: bool


@dataclass(frozen=True)
class Exchanger:
    """A provider of exchanges, as `AnyProvider`. make: this rank's end in a group of ranks, for a layer's case."""

    name: str
    why_not: Callable[[ExchangeCase], str]
    make: Callable[[ExpertGroup, ExchangeCase], Transit]
    bits: Bits = "own"
    kind: str = "exchange"
