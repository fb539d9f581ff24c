"""How rows of a MoE layer reach their experts and come back over torch's transport, as the steps of a `Carrier`.

    flat          pack --> [dispatch] --> arrive      experts      depart --> [combine] --> collect
    hierarchical  pack --> [dispatch, rail] --> relay --> [dispatch, node] --> arrive
    allgather     depart --> [combine, node] --> relay_back --> [combine, rail] --> collect

Brackets are exchanges. ``hierarchical`` and ``allgather`` have two hops: between nodes and inside a node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from schedc_runtime.moe import routes
from schedc_runtime.moe.carrier_facts import CarrierFacts
from schedc_runtime.moe.counts import Choices, Counts, Method
from schedc_runtime.moe.exchange import RowExchange
from schedc_runtime.moe.products import RowGroups
from schedc_runtime.moe.routes import RowStep
from schedc_runtime.providers import TORCH
from schedc_runtime.ranks.exchange import RoutingPart


class Carrier(Protocol):
    """The steps of a MoE layer between its plan and its experts, and behind these, as a module.

    Every step between exchanges is a submodule, and every exchange too.
    """

    name: str

    @property
    def facts(self) -> CarrierFacts: ...

    @property
    def route(self) -> Callable[[Choices, Counts, str], Any] | None:
        """Plans a microbatch from this rank's choices and everyone's counts; None where `plan_route` does."""
        ...

    def dispatch(self, route: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Tokens [N, H] and gate weights [N, k] to what `arrive` takes."""
        ...

    def arrive(self, route: Any, *arrived: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
        """The rows [P, H] of this rank's experts by expert, their gate weights [P], and whose rows are whose."""
        ...

    def combine(self, route: Any, rows: Tensor) -> Tensor:
        """Results [P, H] of the experts to their sums [N, H] where the tokens came from."""
        ...

    def children(self) -> Any:
        """The submodules."""
        ...


class Hops(RoutingPart):
    """Torch's transport: one exchange between all ranks, or one between nodes and one inside a node.

    fp8: rows travel to the experts in fp8 with a scale each. static: a capacity or bound makes sizes constant.
    """

    name, route = TORCH, None

    def __init__(self, method: Method, *, fp8: bool = False, static: bool = False) -> None:
        super().__init__()
        self.flat = method == "flat"
        lanes = ("comm",) if self.flat else ("rail", "node")
        self.facts = CarrierFacts(
            "by expert, rank and node", "loop", static, streams=lanes, asks=() if static else ("dispatch",)
        )
        if self.flat:
            self.dispatch_flat = RowExchange("dispatch", "flat", fp8=fp8)
            self.combine_flat = RowExchange("combine", "flat", reverse=True)
        else:
            self.dispatch_rail = RowExchange("dispatch", "rail", fp8=fp8)
            self.dispatch_node = RowExchange("dispatch", "node", fp8=fp8)
            self.combine_node = RowExchange("combine", "node", reverse=True)
            self.combine_rail = RowExchange("combine", "rail", reverse=True)
        self.pack, self.relay, self.landed = RowStep(routes.pack), RowStep(routes.relay), RowStep(routes.arrive_grouped)
        self.depart, self.relay_back = RowStep(routes.depart), RowStep(routes.relay_back)
        self.collect = RowStep(routes.collect)

    def dispatch(self, route: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Tokens [N, H] and gate weights [N, k] to rows [rows, H] and weights; two hops also give experts [rows, k]."""
        packed: tuple[Tensor, ...] = self.pack(route, tokens, weight)
        if self.flat:
            rows, gates = packed
            rows, gates = self.dispatch_flat(route, rows, gates)
            return rows, gates
        rows, gates, ids = packed
        rows, gates, ids = self.dispatch_rail(route, rows, gates, ids)
        rows, gates, ids = self.relay(route, rows, gates, ids)
        rows, gates, ids = self.dispatch_node(route, rows, gates, ids)
        return rows, gates, ids

    def arrive(self, route: Any, *arrived: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
        """The rows [P, H] of the experts here, their weights [P], and their groups."""
        rows, gates, groups = self.landed(route, *arrived)
        return rows, gates, groups

    def combine(self, route: Any, rows: Tensor) -> Tensor:
        """Results [P, H] to sums [N, H]."""
        rows = self.depart(route, rows)
        if self.flat:
            (rows,) = self.combine_flat(route, rows)
        else:
            (rows,) = self.combine_node(route, rows)
            rows = self.relay_back(route, rows)
            (rows,) = self.combine_rail(route, rows)
        output: Tensor = self.collect(route, rows)
        return output
