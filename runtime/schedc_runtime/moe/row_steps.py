"""The steps of a MoE layer on rows, as submodules: a trace shows each of them as one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from schedc.ir.plan import Level
from schedc_runtime.moe import routes
from schedc_runtime.moe.products import RowGroups
from schedc_runtime.moe.routes import Route
from schedc_runtime.recompute.regions import region_of_rows


class Pack(nn.Module):
    """Tokens [N, H] and gate weights [N, k] to what the first hop sends, see `routes.pack`."""

    def forward(self, route: Route, tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return routes.pack(route, tokens, weight)


class Relay(nn.Module):
    """[rows, H], [rows, k] and [rows, k] that came over the rail, to those that go on inside the node."""

    def forward(self, route: Route, rows: Tensor, gates: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return routes.relay(route, rows, gates, ids)


class Arrive(nn.Module):
    """[rows, H] and weights that came over the last hop, to the rows of the local experts: [P, H] and [P].

    Also returns which rows belong to which expert, as the host and the device know it.
    With bounds only the device knows it, and rows behind the last expert's are padding.
    """

    def forward(self, route: Route, rows: Tensor, gates: Tensor, *ids: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
        for numbers in ids:
            routes.land(route, numbers)
        rows, gates = region_of_rows(Level.LIGHT, routes.arrive, route, rows, gates)
        if route.shape.capacity is not None:
            return rows, gates, RowGroups()
        ends = route.counts.mine.sum(0).cumsum(0, dtype=torch.int32)
        if route.shape.bounds is not None:
            return rows, gates, RowGroups(ends=ends.clamp(max=len(rows)))
        return rows, gates, RowGroups(route.sizes.counts, ends)


class Depart(nn.Module):
    """[P, H] outputs of the experts to the rows [rows, H] that go back over the last hop."""

    def forward(self, route: Route, rows: Tensor) -> Tensor:
        return routes.depart(route, rows)


class RelayBack(nn.Module):
    """[rows, H] that came back inside the node, to those that go back over the rail."""

    def forward(self, route: Route, rows: Tensor) -> Tensor:
        return routes.relay_back(route, rows)


class Collect(nn.Module):
    """[rows, H] that came back to this rank, summed to [N, H]."""

    def forward(self, route: Route, rows: Tensor) -> Tensor:
        return routes.collect(route, rows)
