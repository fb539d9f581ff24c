"""Measures what a rank's plan of a microbatch's routes takes, on the device from counts.

    python benchmarks/routes.py [--json] [--repetitions N] [--tokens N] [--experts E] [--top K]

A plan is a rank's computation for one microbatch: its counts, all sizes, and every tree of indexes. The exchanges
themselves are left out; what they would bring is prepared: everyone's counts, and the experts' numbers of rows that
came.

Instrument: processor time of one thread, the median of several runs.

Printed: `ms` by method and ranks. `gathered_bytes` is what a rank gathers from all, by ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import give, parser_of
from torch import Tensor

from schedc_runtime.moe import trees
from schedc_runtime.moe.counts import Counts, Method, Shape, ascending, counted_rows, counts_of_experts
from schedc_runtime.moe.routes import land, leave, pass_on, plan_route

GROUPS = {16: (2, 8), 64: (8, 8)}
"""Number of ranks: (nodes, ranks of a node)."""
METHODS: tuple[Method, ...] = ("flat", "hierarchical")


def drawn(ranks: int, tokens: int, experts: int, top: int) -> Tensor:
    """[ranks, tokens, top] different experts of each token, uniformly."""
    generator = torch.Generator().manual_seed(ranks)
    return torch.stack(
        [torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top].contiguous() for _ in range(ranks)]
    )


class Planned:
    """One rank's plan on the device, with everything prepared that exchanges bring."""

    def __init__(self, everyone: Tensor, shape: Shape) -> None:
        self.shape, self.index = shape, everyone[shape.rank]
        self.table = counts_of_experts(everyone, shape).table
        self.weight = torch.rand(self.index.shape)
        self.over_rail, self.landed = _numbers(everyone, shape) if shape.two_hops else (None, None)

    def __call__(self) -> None:
        shape = self.shape
        choices = ascending(self.index, shape.experts)
        counted_rows(choices, self.index, shape, self.weight)
        route = plan_route(choices, Counts(self.table, shape))
        leave(route)
        if self.over_rail is None or self.landed is None:
            trees.flat_landing(route.counts, route.sizes.rows)
            return
        pass_on(route, self.over_rail)
        land(route, self.landed)


def _numbers(everyone: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The experts' numbers of the rows that reach a rank over the rail, and of those that reach it in its node."""
    node, position = shape.place
    over_rail, landed = [], []
    for passer in range(shape.per_node):
        coming = []
        for source in range(shape.nodes):
            sorted_ids = ascending(everyone[source * shape.per_node + passer], shape.experts).ids
            of_node = sorted_ids.div(shape.local * shape.per_node, rounding_mode="floor") == node
            coming.append(sorted_ids[of_node.any(-1)])
        passed = torch.cat(coming)
        if passer == position:
            over_rail.append(passed)
        of_rank = passed.div(shape.local, rounding_mode="floor") == shape.rank
        landed.append(passed[of_rank.any(-1)])
    return torch.cat(over_rail), torch.cat(landed)


def milliseconds(run: Callable[[], Any], repetitions: int) -> float:
    """Processor time of a run, the median; the first run is not counted."""
    times = []
    for _ in range(repetitions + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times[1:])


def plans(args: argparse.Namespace) -> dict[str, Any]:
    """The times of plans by method and number of ranks, and the bytes that a rank gathers."""
    times: dict[str, dict[int, float]] = {}
    gathered: dict[int, int] = {}
    for ranks, (nodes, per_node) in GROUPS.items():
        everyone = drawn(ranks, args.tokens, args.experts, args.top)
        for method in METHODS:
            planned = Planned(everyone, Shape(args.experts, nodes, per_node, ranks // 2 + 1, method))
            times.setdefault(method, {})[ranks] = round(milliseconds(planned, args.repetitions), 2)
            gathered[ranks] = max(gathered.get(ranks, 0), planned.table.nbytes)
    return {"ms": times, "gathered_bytes": gathered}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    give(plans(args), args)


if __name__ == "__main__":
    main()
