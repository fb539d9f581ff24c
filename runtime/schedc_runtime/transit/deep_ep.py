"""DeepEP as a `Transit`: `deep_ep.Buffer`, and version 2 (`ElasticBuffer`, later `EPBuffer`). Neither ever ran.

Written from the library's documented signatures, and tested against a module that has them. A dispatch brings a token
once to each rank that has one of its experts, with numbers of experts there (-1: elsewhere) and weights. Copies for
each expert are made here, behind it, and summed here before the combine:

    recv_x [T, H], recv_topk_idx [T, k]  --by expert-->  rows [P, H]        results [P, H] --by token--> [T, H]

Both versions let the host wait in a dispatch, for numbers of rows. The library sends on a stream of its own, which
starts behind the stream that is current at the call.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from schedc_runtime.device.base import ComputeDevice, DeviceEvent
from schedc_runtime.device.choice import device_for
from schedc_runtime.moe.carrier_facts import CarrierFacts
from schedc_runtime.moe.counts import Shape
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit.base import Arrived, ExchangeCase, Flight

BUFFERS = {"deep_ep": ("Buffer",), "deep_ep_2": ("EPBuffer", "ElasticBuffer")}
"""The class of the library by provider, the latest name first: a release has one of version 2."""

_SUMS = "on each rank by expert, then between ranks as DeepEP adds"


def deep_ep_lacks(name: str, case: ExchangeCase) -> str:
    """Why a version cannot serve a case; empty where it can."""
    if find_spec("deep_ep") is None:
        return "the package `deep_ep` is not installed"
    try:
        library = _library(name)
    except Exception as error:  # the package looks for its libraries, and for their versions, when it is imported
        return f"the package `deep_ep` does not import: {type(error).__name__}: {error}"
    if library is None:
        return f"the installed `deep_ep` has no `{'` and no `'.join(BUFFERS[name])}`"
    if not case.processes:
        return "DeepEP needs several ranks, each a process of its own"
    try:
        for config in ("get_dispatch_config", "get_combine_config") if name == "deep_ep" else ():
            getattr(library, config)(case.ranks)
    except AssertionError as error:
        return f"DeepEP has no configuration for {case.ranks} ranks: {error}"
    if case.dtype is not torch.bfloat16:
        return f"rows of {str(case.dtype).removeprefix('torch.')}: DeepEP carries bfloat16"
    return ""


def _library(name: str) -> Any:
    """The class of a version; None where the installed package has none."""
    package = import_module("deep_ep")
    return next((found for each in BUFFERS[name] if (found := getattr(package, each, None)) is not None), None)


class OverlapEvent:
    """The event of a call of DeepEP. Only a current stream can wait, and version 2 sorts its rows then."""

    def __init__(self, event: Any, device: ComputeDevice) -> None:
        self._event, self._device = event, device

    def wait(self, stream: Any) -> None:
        with self._device.on(stream):
            self._event.current_stream_wait()

    def synchronize(self) -> None:
        self.wait(self._device.current())
        self._device.record().synchronize()

    def query(self) -> bool:
        return False


class TokenWay(NamedTuple):
    """The way of a dispatch. handle: the library's. order: [P] places, among all T x k choices, by expert.

    ends: [E] int32. tokens, top: T and k.
    """

    handle: Any
    order: Tensor
    ends: Tensor
    tokens: int
    top: int


def by_expert(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """([P] places of choices ids [T, k] by expert, [E] int32 ends); choices below 0 are left out. rows: P."""
    keys = ids.reshape(-1).long()
    keys, order = keys.masked_fill(keys < 0, experts).sort(stable=True)
    last = torch.arange(experts, device=ids.device)
    return order[:rows], torch.searchsorted(keys, last, right=True, out_int32=True)


class DeepEp:
    """What both versions share. A subclass calls the library."""

    def __init__(self, group: ExpertGroup, case: ExchangeCase) -> None:
        self.group: dist.ProcessGroup = group.expert.process_group  # type: ignore[attr-defined]
        self.case, self.device = case, device_for(case.device)

    facts: CarrierFacts

    def _send(self, rows: Tensor, weights: Tensor | None, plan: Any, handle: Any) -> tuple[Any, ...]:
        """(rows, ids, weights, [E] numbers of rows, handle, event); of a handle's way the first and the last count."""
        raise NotImplementedError

    def _return(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        raise NotImplementedError

    def start_dispatch(
        self, rows: Tensor, weights: Tensor | None, plan: Any, after: DeviceEvent, handle: Any = None
    ) -> Flight:
        """Send rows [N, H] and weights [N, k]."""
        after.wait(self.device.current())
        native = None if handle is None else handle.handle
        sent = self._send(rows.contiguous(), None if weights is None else weights.float(), plan, native)
        dtype = None if weights is None else weights.dtype
        return Flight(OverlapEvent(sent[-1], self.device), (sent, handle, dtype))

    def finish_dispatch(self, flight: Flight) -> Arrived:
        (rows, ids, weights, counts, native, _), way, dtype = flight.payload
        gates = None
        if way is None:
            order, ends = by_expert(ids, self.case.experts // self.case.ranks, sum(counts))
            way = TokenWay(native, order, ends, *ids.shape)
            gates = weights.reshape(-1).index_select(0, order).to(dtype)
        return Arrived(rows.index_select(0, way.order // way.top), gates, way.ends, way)

    def start_combine(self, rows: Tensor, handle: Any, after: DeviceEvent, gates: Tensor | None = None) -> Flight:
        """Sum results [P, H] by token, and gradients [P] by choice; send both back."""
        way: TokenWay = handle
        after.wait(self.device.current())
        places = rows.new_zeros(way.tokens * way.top, rows.shape[1]).index_copy_(0, way.order, rows)
        weights = None
        if gates is not None:
            weights = gates.new_zeros(way.tokens * way.top, dtype=torch.float32)
            weights = weights.index_copy_(0, way.order, gates.float()).view(way.tokens, way.top)
        summed = places.view(way.tokens, way.top, rows.shape[1]).sum(1)
        sums, back, event = self._return(summed, way.handle, weights)
        dtype = None if gates is None else gates.dtype
        return Flight(OverlapEvent(event, self.device), (sums, back, dtype))

    def finish_combine(self, flight: Flight) -> tuple[Tensor, Tensor | None]:
        """[N, H] sums and [N, k] gradients of the weights."""
        sums, weights, dtype = flight.payload
        return sums, None if dtype is None else weights.to(dtype)


class DeepEp1(DeepEp):
    """`deep_ep.Buffer`, its kernels for training."""

    def __init__(self, group: ExpertGroup, case: ExchangeCase) -> None:
        super().__init__(group, case)
        self.buffer = _buffer(self.group, 2 * case.width)
        self.facts = CarrierFacts(_SUMS, streams=("DeepEP",), sms=type(self.buffer).num_sms, asks=("dispatch",))

    def plan(self, ids: Tensor, shape: Shape) -> Any:
        """The choices [N, k], and the library's layout of them."""
        return ids, self.buffer.get_dispatch_layout(ids, shape.experts)

    def _send(self, rows: Tensor, weights: Tensor | None, plan: Any, handle: Any) -> tuple[Any, ...]:
        if handle is not None:
            return tuple(self.buffer.dispatch(rows, handle=handle, async_finish=True))
        ids, (of_rank, of_node, of_expert, in_rank, _) = plan
        named = {"num_tokens_per_rank": of_rank, "num_tokens_per_rdma_rank": of_node, "is_token_in_rank": in_rank}
        named |= {"num_tokens_per_expert": of_expert, "topk_idx": ids, "topk_weights": weights, "async_finish": True}
        return tuple(self.buffer.dispatch(rows, **named))

    def _return(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        sums, back, event = self.buffer.combine(rows, handle, topk_weights=weights, async_finish=True)
        return sums, back, event


class DeepEp2(DeepEp):
    """`deep_ep.EPBuffer` or `ElasticBuffer`, in the order of rows that it calls deterministic."""

    def __init__(self, group: ExpertGroup, case: ExchangeCase) -> None:
        super().__init__(group, case)
        self._most, self._buffer = 0, None
        self.facts = CarrierFacts(_SUMS, streams=("DeepEP",), asks=("dispatch",))

    def plan(self, ids: Tensor, shape: Shape) -> Any:
        """The choices [N, k]. The buffer is made for the most tokens of a rank, which all ranks have alike."""
        if self._buffer is None or shape.tokens > self._most:
            self._most = max(1, shape.tokens)
            self._buffer = _elastic(self.group, self._most, self.case.width, self.case.top)
        return ids

    def _send(self, rows: Tensor, weights: Tensor | None, plan: Any, handle: Any) -> tuple[Any, ...]:
        way = {"topk_idx": plan, "topk_weights": weights} if handle is None else {"handle": handle}
        named = {"num_experts": self.case.experts, "async_with_compute_stream": True}
        assert self._buffer is not None
        received, ids, back, handle, event = self._buffer.dispatch(rows, **way, **named)
        return received, ids, back, handle.num_recv_tokens_per_expert_list, handle, event

    def _return(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        assert self._buffer is not None
        named = {"topk_weights": weights, "async_with_compute_stream": True}
        sums, back, event = self._buffer.combine(rows, handle=handle, **named)
        return sums, back, event


@cache
def _buffer(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """The buffer of version 1, which layers share, of the sizes that the library's configurations ask for."""
    library = _library("deep_ep")
    size = group.size()
    configs = [library.get_dispatch_config(size), library.get_combine_config(size)]
    near = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
    return library(group, near, far)


@cache
def _elastic(group: dist.ProcessGroup, tokens: int, width: int, top: int) -> Any:
    """The buffer of version 2, which layers share."""
    named = {"num_max_tokens_per_rank": tokens, "hidden": width, "num_topk": top, "deterministic": True}
    return _library("deep_ep_2")(group, **named)
