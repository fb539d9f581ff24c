"""Parcels: tensors with JSON, carried from one rank to another between the messages of a program.

sizes [2]       bytes of the JSON and of the tensors
JSON            facts; name, type and shape of each tensor
tensors         their bytes, each at a multiple of 16
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.audit.digests import raw_bytes
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.transport.base import Transfer, Transport
from schedc_runtime.transport.collectives import TorchCommunicator
from schedc_runtime.transport.distributed import TorchTransport

_ALIGNED = 16


class Parcel(NamedTuple):
    """Tensors [...] by name, and JSON."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Courier:
    """Carries parcels between two places that are in one pipeline, or that hold the same stages."""

    def __init__(self, assembly: Assembly) -> None:
        self._network, self._device = assembly.network, assembly.device

    def carry(self, parcel: Parcel | None, source: Coordinate, target: Coordinate) -> Parcel | None:
        """Both places call it, ``source`` with a parcel; ``target`` gets it. Other places get None."""
        here = self._network.local
        if self._network.in_process:
            return None if parcel is None else Parcel({n: t.clone() for n, t in parcel.tensors.items()}, parcel.facts)
        if here[0] not in (source, target):
            return None
        receives = here[0] == target
        transport, peer = self._way(here[0], source if receives else target)
        if receives:
            return self._receive(transport, peer)
        self._send(transport, peer, parcel)
        return None

    def _way(self, here: Coordinate, there: Coordinate) -> tuple[Transport, int]:
        """A transport to another place, and its number there."""
        if here.replica == there.replica:
            return self._network.transports[here], there.pipeline
        group = self._network.peer_groups[here].replicas
        own = self._network.transports[here]
        assert isinstance(group, TorchCommunicator)
        assert isinstance(own, TorchTransport)
        assert group.process_group is not None
        return own.over(group.process_group), there.replica

    def _send(self, transport: Transport, peer: int, parcel: Parcel | None) -> None:
        assert parcel is not None
        head, payload = packed_parcel(parcel)
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(self._device)
        sizes = torch.tensor([len(head), len(payload)], device=self._device)
        for tensors in ((sizes,), (text, payload.to(self._device))):
            _move(transport, peer, tensors, receive=False)

    def _receive(self, transport: Transport, peer: int) -> Parcel:
        sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
        _move(transport, peer, (sizes,), receive=True)
        text, payload = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes.tolist())
        _move(transport, peer, (text, payload), receive=True)
        return unpacked_parcel(text.cpu().numpy().tobytes(), payload)


def _move(transport: Transport, peer: int, tensors: tuple[Tensor, ...], *, receive: bool) -> None:
    (handle,) = transport.post([Transfer(peer, receive, tensors)])
    transport.wait(handle)


def packed_parcel(parcel: Parcel) -> tuple[bytes, Tensor]:
    """The JSON of a parcel, and [bytes] its tensors on their device."""
    entries, parts = [], [torch.empty(0, dtype=torch.uint8)]
    for name, tensor in parcel.tensors.items():
        flat = raw_bytes(tensor)
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        parts = parts if len(parts) > 1 else [part.to(flat.device) for part in parts]
        parts += [flat, flat.new_zeros(-len(flat) % _ALIGNED)]
    return json.dumps([entries, dict(parcel.facts)]).encode(), torch.cat(parts)


def unpacked_parcel(head: bytes, payload: Tensor) -> Parcel:
    """The parcel of `packed_parcel`. payload: [bytes] uint8; the tensors of the parcel are views of it."""
    entries, facts = json.loads(head)
    tensors, begin = {}, 0
    for name, kind, shape in entries:
        dtype: torch.dtype = getattr(torch, kind)
        size = prod(shape) * dtype.itemsize
        tensors[name] = payload[begin : begin + size].view(dtype).reshape(shape)
        begin += size + -size % _ALIGNED
    return Parcel(tensors, facts)
