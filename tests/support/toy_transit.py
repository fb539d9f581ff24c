"""A library of expert exchanges for tests: it packs by itself, sums in another order, and works on a stream of its own.

Every rank sends all of its N x k choices to every rank, with the expert's number there. A number behind the last one
marks a choice of another rank. Shapes are therefore static, and nobody asks the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from schedc_runtime.device.base import ComputeDevice, DeviceEvent
from schedc_runtime.device.choice import device_for
from schedc_runtime.moe.carrier_facts import CarrierFacts
from schedc_runtime.moe.counts import Shape
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit.base import Arrived, ExchangeCase, Exchanger, Flight

_STREAMS: WeakKeyDictionary[ComputeDevice, Any] = WeakKeyDictionary()
"""By device: ranks of one process share the stream."""


class ToyWay(NamedTuple):
    """order: [P] rows by expert. ends: [E] int32. inside: [P, 1] which rows have an expert. choices: k."""

    order: Tensor
    ends: Tensor
    inside: Tensor
    top: int


class ToyTransit:
    """The toy's end of a rank."""

    facts = CarrierFacts("by the last choice of a token first", static=True, streams=("toy",))

    def __init__(self, group: ExpertGroup, case: ExchangeCase) -> None:
        self.group, self.case, self.device = group, case, device_for(case.device)
        self.stream = _STREAMS.setdefault(self.device, self.device.stream("toy"))

    def plan(self, ids: Tensor, shape: Shape) -> Tensor:
        """[R, N k] the experts' numbers on each rank; ``local`` for none."""
        first = torch.arange(shape.ranks, device=ids.device)[:, None] * shape.local
        there = ids.reshape(1, -1) - first
        return there.masked_fill((ids.reshape(1, -1) < 0) | (there < 0) | (there >= shape.local), shape.local)

    def start_dispatch(
        self, rows: Tensor, weights: Tensor | None, plan: Tensor, after: DeviceEvent, handle: Any = None
    ) -> Flight:
        after.wait(self.stream)
        ranks, top = len(plan), plan.shape[1] // max(1, len(rows))
        with self.device.on(self.stream):
            each = rows.repeat_interleave(top, 0).repeat(ranks, 1)
            tensors = [each] if weights is None else [each, weights.reshape(-1).repeat(ranks), plan.reshape(-1)]
        return self._sent(tensors, plan.shape[1], (handle, top), [rows, plan, *([] if weights is None else [weights])])

    def finish_dispatch(self, flight: Flight) -> Arrived:
        done, (way, top) = flight.done, flight.payload
        assert isinstance(done, ToyEvent)
        with self.device.on(self.stream):
            rows, *beside = done.received
            if way is None:
                weights, ids = beside
                experts = self.case.experts // self.case.ranks
                sorted_ids, order = ids.sort(stable=True)
                ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device), right=True).int()
                way = ToyWay(order, ends, (sorted_ids < experts)[:, None], top)
                gates = weights.index_select(0, order)
            result = rows.index_select(0, way.order)
        return self._given(Arrived(result, gates if beside else None, way.ends, way))

    def start_combine(self, rows: Tensor, handle: Any, after: DeviceEvent, gates: Tensor | None = None) -> Flight:
        way: ToyWay = handle
        after.wait(self.stream)
        with self.device.on(self.stream):
            own = rows.masked_fill(~way.inside, 0)
            tensors = [torch.zeros_like(own).index_copy_(0, way.order, own)]
            if gates is not None:
                known = gates.masked_fill(~way.inside[:, 0], 0)
                tensors.append(torch.zeros_like(known).index_copy_(0, way.order, known))
        return self._sent(tensors, len(rows) // self.case.ranks, way, [rows, *([] if gates is None else [gates])])

    def finish_combine(self, flight: Flight) -> tuple[Tensor, Tensor | None]:
        done, way = flight.done, flight.payload
        assert isinstance(done, ToyEvent)
        with self.device.on(self.stream):
            rows, *gates = done.received
            choices = rows.view(self.case.ranks, -1, way.top, rows.shape[1]).sum(0)
            sums = torch.zeros_like(choices[:, 0])
            for choice in reversed(choices.unbind(1)):
                sums = sums + choice
            back = gates[0].view(self.case.ranks, -1, way.top).sum(0) if gates else None
        return self._given((sums, back))

    def _sent(self, tensors: list[Tensor], each: int, payload: Any, read: list[Tensor]) -> Flight:
        """Send a block of ``each`` rows to every rank. read: what the stream reads of compute's."""
        for tensor in read:
            self.device.used_by(tensor, self.stream)
        with self.device.on(self.stream):
            splits = [each] * self.case.ranks
            handle = self.group.expert.all_to_all(tensors, splits, splits, "toy")
        return Flight(ToyEvent(self, handle), payload, lambda: self.group.expert.ready(handle))

    def _given(self, given: Any) -> Any:
        """Results that compute goes on with, behind the toy's stream."""
        current = self.device.current()
        self.device.record(self.stream).wait(current)
        for tensor in given:
            if isinstance(tensor, Tensor):
                self.device.used_by(tensor, current)
        return given


class ToyEvent:
    """The arrival of a flight."""

    def __init__(self, toy: ToyTransit, handle: Any) -> None:
        self._toy, self._handle = toy, handle
        self.received: tuple[Tensor, ...] = ()

    def wait(self, stream: Any) -> None:
        toy = self._toy
        if self._handle is not None:
            with toy.device.on(toy.stream):
                self.received, self._handle = toy.group.expert.wait(self._handle), None
        toy.device.record(toy.stream).wait(stream)

    def synchronize(self) -> None:
        self.wait(self._toy.device.current())

    def query(self) -> bool:
        return False


TOY = Exchanger("toy", lambda case: "", ToyTransit)
PROUD = Exchanger("proud", lambda case: "rows of float8 alone" if case.top < 9 else "", ToyTransit)
