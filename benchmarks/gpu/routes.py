"""Section `routes`: what a rank's plan of routes takes with a capacity, as written and captured in a graph."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting, medians
from schedc_runtime.moe import trees
from schedc_runtime.moe.counts import Method, Shape, ascending, counted_rows, counts_of_experts
from schedc_runtime.moe.routes import leave, plan_route

CLAIMS = (
    Claim(
        "a rank's plan of routes is no hindrance when it is captured",
        "64 ranks, 256 experts, top 8, 4,096 tokens, capacity 1.25, flat exchange; in ms",
        (Bound("routes.ms_64_ranks", "<=", 0.4), Bound("routes.ms_written", "<=", 1.5)),
    ),
)

CAPACITY = 1.25


def measure(setting: Setting) -> dict[str, Any]:
    nodes, per_node = setting.ranks
    plan = planned(setting, nodes, per_node)
    written = 1e3 * medians(setting, {"plan": plan})["plan"]
    entries: dict[str, Any] = {"ranks": nodes * per_node, "ms_written": written}
    if not setting.gpu:
        return {"routes": entries | {"ms_64_ranks": not_measured("a CPU captures no graph of launches")}}
    return {"routes": entries | {"ms_64_ranks": 1e3 * medians(setting, {"plan": captured(plan)})["plan"]}}


def planned(setting: Setting, nodes: int, per_node: int) -> Callable[[], Any]:
    """A rank's whole plan of a flat exchange, with everything that the exchange of counts brings prepared."""
    method: Method = "flat"
    capacity = ceil(setting.tokens * setting.top / setting.routed * CAPACITY)
    rank = nodes * per_node // 2 + 1
    shape = Shape(setting.routed, nodes, per_node, rank, method, capacity, setting.tokens)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(nodes * per_node, setting.tokens, setting.routed, generator=generator)
    everyone = scores.topk(setting.top).indices
    index = everyone[rank].to(setting.device)
    counts = counts_of_experts(everyone, shape)
    counts = type(counts)(counts.table.to(setting.device), shape)
    weight = torch.ones(index.shape, device=setting.device)

    def plan() -> Any:
        choices = ascending(index, shape.experts)
        counted_rows(choices, index, shape, weight)
        route = plan_route(choices, counts)
        leave(route)
        return trees.flat_landing(route.counts, route.sizes.rows)

    return plan


def captured(plan: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the launches of ``plan``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan()  # what a first run makes must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = plan()
    return lambda: (graph.replay(), kept)
