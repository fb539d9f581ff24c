"""A MoE layer whose rows a `Transit` carries: one exchange there and one back, and checks of what the library gives.

    tokens, weights --[dispatch]--> rows by expert, gates, ends --> experts --[combine]--> sums

At every flight the shapes, dtypes, devices and events of the library are checked, which costs no wait. At the first one
the ends are compared with everyone's counts of choices, for which the host waits once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.device.base import DeviceEvent
from schedc_runtime.device.choice import HostCopy, device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.carrier_facts import CarrierFacts
from schedc_runtime.moe.counts import Choices, Counts, Shape
from schedc_runtime.moe.products import RowGroups
from schedc_runtime.moe.routes import RowStep
from schedc_runtime.ranks.exchange import Exchange, Pending, RoutingPart
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transit.base import Arrived, Exchanger, Flight, Transit


class TransitFault(RuntimeFault):
    """A library's transit gives what `Transit` does not allow."""


@dataclass(eq=False)
class CarriedRoute:
    """A rank's view of one microbatch's rows.

    choices: those of this rank. counts: those of all ranks. where: the layer and the microbatch, for messages.
    plan: the library's. arrived: the first dispatch, without its rows. weights: dtype of the gate weights.
    """

    choices: Choices
    counts: Counts
    where: str
    plan: Any
    arrived: Arrived | None = None
    weights: torch.dtype = torch.float32

    @property
    def shape(self) -> Shape:
        return self.counts.shape

    @property
    def leaving(self) -> None:
        """A library tells no rows of copies."""
        return None

    @property
    def received(self) -> Tensor:
        """[1] the number of rows of the experts here."""
        return self.counts.mine.sum().view(1)

    @property
    def handle(self) -> Any:
        """The way, once rows have gone it."""
        assert self.arrived is not None
        return self.arrived.handle


class Travel(NamedTuple):
    """A started exchange. sent: the rows [...] that the library may still read."""

    flight: Flight
    route: CarriedRoute
    sent: Tensor


class TransitExchange(Exchange):
    """An exchange of a library. Compute waits for the event of a flight before the library finishes it."""

    differentiable = True

    def __init__(self, name: str, transit: Transit, group: ExpertGroup) -> None:
        super().__init__()
        self.name, self.transit, self.group = name, transit, group
        self.compared = False
        """Whether the ends of a dispatch were compared."""

    def ready(self, pending: Pending) -> bool:
        return bool(pending.handle.flight.ready())

    def _started(self, route: CarriedRoute, rows: Tensor, start: Callable[[DeviceEvent], Flight]) -> Pending:
        flight = start(device_for(rows.device).record())
        if not all(callable(getattr(getattr(flight, "done", None), call, None)) for call in ("wait", "synchronize")):
            raise self._fault(f"started a {self.label} and gave no event", "set `Flight.done` to an event behind it")
        return Pending(self.group.expert, Travel(flight, route, rows))

    def _sent_by_handle(self, route: CarriedRoute, rows: Tensor) -> Pending:
        """A dispatch of rows [N, H] on the way of the first."""
        return self._started(
            route, rows, lambda after: self.transit.start_dispatch(rows, None, route.plan, after, route.handle)
        )

    def _dispatched(self, pending: Pending) -> Arrived:
        flight, route, sent = self._joined(pending)
        arrived = self.transit.finish_dispatch(flight)
        self._check("rows", arrived.rows, (None, sent.shape[1]), sent.dtype, sent)
        self._check("ends", arrived.ends, (route.shape.local,), torch.int32, sent)
        return arrived

    def _combined(self, pending: Pending) -> tuple[Tensor, Tensor | None]:
        flight, route, sent = self._joined(pending)
        sums, gates = self.transit.finish_combine(flight)
        self._check("sums", sums, (len(route.choices.ids), sent.shape[1]), sent.dtype, sent)
        return sums, gates

    def _joined(self, pending: Pending) -> Travel:
        travel: Travel = pending.handle
        travel.flight.done.wait(device_for(travel.sent.device).current())
        return travel

    def _check(self, what: str, tensor: Any, shape: tuple[int | None, ...], dtype: torch.dtype, like: Tensor) -> None:
        """Raise `TransitFault` unless a tensor [...] has shape (None: any), dtype and device (of ``like`` [...])."""
        wanted = f"{str(dtype).removeprefix('torch.')}{['?' if size is None else size for size in shape]}"
        if not isinstance(tensor, Tensor):
            raise self._fault(f"gave no {what}", f"give a tensor {wanted}")
        alike = len(tensor.shape) == len(shape) and all(
            b in (None, a) for a, b in zip(tensor.shape, shape, strict=True)
        )
        if not alike or tensor.dtype is not dtype:
            shown = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise self._fault(f"gave {what} of {shown}", f"give {wanted}")
        device = device_for(like.device)
        if tensor.device != like.device or (not device.supports("streams") and not device.holds(tensor)):
            raise self._fault(f"gave {what} off the device of the rows, {like.device}", "leave them on the device")

    def _fault(self, what: str, help: str) -> TransitFault:
        return TransitFault(f"exchange {self.name}: the library {what} in a {self.label}", help)


class TransitDispatch(TransitExchange):
    """Brings tokens [N, H] and weights [N, k] to rows [P, H], gates [P] and ends [E]."""

    label = "dispatch"

    def start(self, route: CarriedRoute, *payload: Tensor) -> Pending:
        tokens, weights = payload
        route.weights = weights.dtype
        if route.arrived is None:
            return self._started(
                route, tokens, lambda after: self.transit.start_dispatch(tokens, weights, route.plan, after)
            )
        return self._sent_by_handle(route, tokens)  # recomputed: the way of the first, whose rows the combine took

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        route: CarriedRoute = pending.handle.route
        arrived = self._dispatched(pending)
        if route.arrived is None:
            self._check("gates", arrived.gates, (len(arrived.rows),), route.weights, arrived.rows)
            self._compare(arrived, route)
            route.arrived = arrived._replace(rows=arrived.rows.new_empty(0))
        gates = route.arrived.gates
        assert gates is not None
        return arrived.rows, gates.detach(), route.arrived.ends  # autograd marks what is given, and the route stays

    def _compare(self, arrived: Arrived, route: CarriedRoute) -> None:
        """Compare the ends with everyone's counts, once, by one copy to the host."""
        if self.compared:
            return
        self.compared, aligned = True, self.transit.facts.aligned
        chosen = route.counts.mine.sum(0)
        told = HostCopy(torch.cat([chosen, arrived.ends.to(chosen.dtype)])).join().tolist()
        counts, ends = [-(-count // aligned) * aligned for count in told[: len(chosen)]], told[len(chosen) :]
        own = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if own != counts or ends[-1] > len(arrived.rows):
            raise self._fault(
                f"gave {len(arrived.rows)} rows with {own} for each expert, and ranks chose {counts}",
                f"give the rows by expert{f', each padded to a multiple of {aligned}' if aligned > 1 else ''}",
            )

    def start_backward(self, route: CarriedRoute, *gradients: Tensor) -> Pending:
        rows, gates, *_ = gradients
        return self._started(route, rows, lambda after: self.transit.start_combine(rows, route.handle, after, gates))

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        sums, gates = self._combined(pending)
        route: CarriedRoute = pending.handle.route
        self._check("gradients of gates", gates, tuple(route.choices.ids.shape), route.weights, sums)
        return sums, gates


class TransitCombine(TransitExchange):
    """Brings results [P, H] of the experts to sums [N, H]."""

    label = "combine"

    def start(self, route: CarriedRoute, *payload: Tensor) -> Pending:
        (rows,) = payload
        return self._started(route, rows, lambda after: self.transit.start_combine(rows, route.handle, after))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return (self._combined(pending)[0],)

    def start_backward(self, route: CarriedRoute, *gradients: Tensor) -> Pending:
        (sums,) = gradients
        return self._sent_by_handle(route, sums)

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return (self._dispatched(pending).rows,)


class LibraryCarrier(RoutingPart):
    """The `Carrier` of a library. transit: this rank's end; copies of a layer share it."""

    def __init__(self, exchanger: Exchanger, transit: Transit, group: ExpertGroup) -> None:
        super().__init__()
        self.exchanger, self.transit, self.group, self.name = exchanger, transit, group, exchanger.name
        self.there = TransitDispatch(exchanger.name, transit, group)
        self.back = TransitCombine(exchanger.name, transit, group)
        self.offered, self.landed = RowStep(_offered), RowStep(_grouped)

    @property
    def facts(self) -> CarrierFacts:
        return self.transit.facts

    def route(self, choices: Choices, counts: Counts, where: str) -> CarriedRoute:
        """The route of one microbatch."""
        ids = torch.empty_like(choices.ids, dtype=torch.int64)
        ids.scatter_(-1, choices.slots, choices.ids.long())
        plan = self.transit.plan(ids.masked_fill_(ids >= counts.shape.experts, -1), counts.shape)
        return CarriedRoute(choices, counts, where, plan)

    def dispatch(self, route: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Tokens [N, H] and weights [N, k] to rows [P, H], gates [P] and ends [E]."""
        tokens, weight = self.offered(route, tokens, weight)
        rows, gates, ends = self.there(route, tokens, weight)
        return rows, gates, ends

    def arrive(self, route: Any, *arrived: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
        """The rows [P, H] of the experts here, their gates [P], and their groups."""
        rows, gates, groups = self.landed(route, *arrived)
        return rows, gates, groups

    def combine(self, route: Any, rows: Tensor) -> Tensor:
        """Results [P, H] to sums [N, H]."""
        sums: Tensor
        (sums,) = self.back(route, rows)
        return sums

    def __deepcopy__(self, memo: dict[int, Any]) -> LibraryCarrier:
        return LibraryCarrier(self.exchanger, self.transit, self.group)


def _offered(route: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] and [N, k] as libraries take them. A step of its own, which a recomputation runs before it sends again."""
    return tokens.contiguous().view_as(tokens), weight.contiguous().view_as(weight)


def _grouped(route: Any, rows: Tensor, gates: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
    return rows, gates, RowGroups(ends=ends)
