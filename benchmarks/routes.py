"""Compares routes planned on the device from counts with the plan in numpy that they replace.

    python benchmarks/routes.py [--json] [--repetitions N] [--tokens N] [--experts E] [--top K] [--skip-bits]

A plan is all that one rank computes for one microbatch: its counts, all sizes, and every tree of indexes. The exchanges
themselves are left out on both sides; what they would bring is prepared. The plan in numpy (`numpy_plan.py`) has
everyone's choices, the one on the device everyone's counts and the experts' numbers that came with the rows.

Instrument: processor time of one thread. The two ways take turns in one process. A ratio is the median over
neighbouring runs.

Printed: `speedup` and `ms` by method and ranks. `gathered_bytes` is what a rank gathers from all, by ranks.
`combine_speedup` compares the sums of a flat combine in bags with those by chunks, in float32. `bits` says whether the
three methods have the digests of tests/data (float64, float32), or agree with each other (bfloat16).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy_plan import plan as numpy_plan
from torch import Tensor

from schedc_runtime.moe import trees
from schedc_runtime.moe.counts import Choices, Counts, Method, Shape, ascending, counted_rows, counts_of_experts
from schedc_runtime.moe.routes import collect, land, leave, pack, pass_on, plan_route

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


def ratio(first: Callable[[], Any], second: Callable[[], Any], repetitions: int) -> tuple[float, float, float]:
    """(median ratio, ms of the first, ms of the second) of processor time, alternating."""
    times = [[seconds(first), seconds(second)] for _ in range(repetitions + 1)][1:]
    return (
        statistics.median(a / b for a, b in times),
        1e3 * statistics.median(a for a, _ in times),
        1e3 * statistics.median(b for _, b in times),
    )


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def plans(args: argparse.Namespace) -> dict[str, Any]:
    """The plans of both ways, by method and number of ranks."""
    speedup: dict[str, dict[int, float]] = {}
    times: dict[str, dict[int, dict[str, float]]] = {}
    gathered: dict[int, int] = {}
    for ranks, (nodes, per_node) in GROUPS.items():
        everyone = drawn(ranks, args.tokens, args.experts, args.top)
        small = everyone.to(torch.int16)
        for method in METHODS:
            shape = Shape(args.experts, nodes, per_node, ranks // 2 + 1, method)
            device = Planned(everyone, shape)
            value, before, after = ratio(partial(numpy_plan, small, shape), device, args.repetitions)
            speedup.setdefault(method, {})[ranks] = round(value, 2)
            times.setdefault(method, {})[ranks] = {"numpy": round(before, 2), "device": round(after, 2)}
            gathered[ranks] = max(gathered.get(ranks, 0), device.table.nbytes)
    return {"speedup": speedup, "ms": times, "gathered_bytes": gathered}


def combine_speedup(
    tokens: int = 4096, experts: int = 256, top: int = 8, width: int = 256, repetitions: int = 7
) -> float:
    """How many times as fast the source of a flat combine adds in bags as by chunks: 16 ranks, float32."""
    nodes, per_node = GROUPS[16]
    everyone = drawn(16, tokens, experts, top)
    shape = Shape(experts, nodes, per_node, 0, "flat")
    before = numpy_plan(everyone, shape).packing[0]
    choices: Choices = ascending(everyone[0], experts)
    route = plan_route(choices, counts_of_experts(everyone, shape))
    packed, _ = pack(route, torch.randn(tokens, width), torch.rand(tokens, top))
    rows = packed.contiguous()  # as a combine brings them back, which moves one tensor
    assert torch.equal(before.total(rows), collect(route, rows))
    return round(ratio(lambda: before.total(rows), lambda: collect(route, rows), repetitions)[0], 2)


def bits() -> dict[str, bool]:
    """Whether methods have the stored digests; in bfloat16, whether they agree."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from runtime.moe.exchange_cases import METHODS as ALL
    from runtime.moe.stored_bits import digests, stored

    result = {
        str(dtype).removeprefix("torch."): all(digests(dtype, method) == stored(dtype) for method in ALL)
        for dtype in (torch.float64, torch.float32)
    }
    flat, *others = [digests(torch.bfloat16, method) for method in ALL]
    return result | {"bfloat16": all(other == flat for other in others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--skip-bits", action="store_true", help="only the times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = plans(args) | {"combine_speedup": combine_speedup(args.tokens, args.experts, args.top)}
    if not args.skip_bits:
        results["bits"] = bits()
    print(json.dumps(results) if args.json else json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
