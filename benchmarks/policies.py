"""Compares orders that a policy chooses by the times inside of cells with the fixed orders among its choices.

    python benchmarks/policies.py [--json] [--tables 30] [--seed 1]

Instrument: the makespan by `schedc.compiler.analyse` with messages that leave and are waited for inside of cells
(`cells.makespan.inside` of `schedc check`). Nothing is timed but the compiler itself, in processor time.

Each table of cells is drawn at random: blocks of the stages, the same or another for every stage, times of segments and
exchanges, method, latency of messages. `adaptive_pipe` is compared with `interleaved_overlap` and `interleaved_1f1b`,
and `zb_greedy` with `zbh1` or `zbh2` where its limit makes that order one of its choices. Printed:

    worst_over_fixed    largest makespan of a policy over that of the fastest of its fixed orders; at most 1
    best_over_fixed     the smallest, and mean_over_fixed, the mean
    shorter             number of comparisons in which the policy's own order is the shorter one
    uneven              number of tables whose stages differ
    cells_toml          the makespan of `adaptive_pipe` and of `interleaved_overlap` under examples/costs/cells.toml
    seconds             processor time of compiling a policy, the mean; and that of the fixed orders of a comparison
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from figures import give, parser_of

from schedc.compiler import analyse
from schedc.source import Source
from schedc.step.costs.costs import Costs, load_costs, parse_costs

CELLS_TOML = Path(__file__).parent.parent / "examples" / "costs" / "cells.toml"
METHODS = ("flat", "hierarchical")


class Comparison(NamedTuple):
    """A policy and the fixed orders among its choices. chunks: stages per rank."""

    policy: str
    fixed: tuple[str, ...]
    sizes: dict[str, int]
    own: dict[str, int]
    """Sizes that the policy alone has."""
    chunks: int


class Outcome(NamedTuple):
    """ratio: makespan of the policy over the least of the fixed orders. seconds: of compiling the policy, and those."""

    ratio: float
    seconds: tuple[float, float]


def comparison(draw: random.Random) -> Comparison:
    P = draw.choice((2, 4, 4, 8))
    M = P * draw.randint(1, 3)
    if draw.random() < 0.7:
        fixed = ("interleaved_overlap", "interleaved_1f1b")
        return Comparison("adaptive_pipe", fixed, {"P": P, "M": M}, {}, 2)
    name, limit = draw.choice((("zbh1", P), ("zbh2", 2 * P - 1)))
    return Comparison("zb_greedy", (name,), {"P": P, "M": M}, {"limit": limit}, 1)


def blocks(draw: random.Random) -> str:
    dense, moe = draw.choice(((0, 1), (0, 2), (1, 1), (2, 0), (1, 2), (0, 3)))
    return " ".join([*["dense"] * dense, *["moe"] * moe])


def table(draw: random.Random, stages: int) -> Costs:
    """Costs with a random table of cells for this number of stages; times in any one unit."""

    def time(most: float) -> float:
        return round(draw.uniform(0.1, 1.0) * most, 2)

    uneven = draw.random() < 0.6
    rows = [blocks(draw) for _ in range(stages if uneven else 1)]
    method = draw.choice(METHODS)
    link = draw.choice((5.0, 20.0, 60.0))
    lines = [
        'schema = "schedc.costs/1"',
        f"[ops]\np2p = {draw.choice((0.0, 1.0, 8.0))}" if draw.random() < 0.5 else "",
        "[cell]",
        f"stages = {json.dumps(rows)}",
        f'method = "{method}"',
        f"dense = {{F = {time(60)}, I = {time(60)}, W = {time(60)}}}",
        f"attention = {{F = {time(30)}, I = {time(30)}, W = {time(30)}}}",
        f"experts = {{F = {time(30)}, I = {time(30)}, W = {time(40)}}}",
        f"shared = {{F = {time(10)}, I = {time(10)}}}" if draw.random() < 0.5 else "",
        f"post = {{F = {time(4)}, I = {time(4)}}}",
        f"dispatch = {{rail = [{time(link)}, {time(link)}], node = {time(8)}}}",
        f"combine = {{rail = [{time(link)}, {time(link)}], node = {time(8)}}}",
    ]
    return parse_costs(Source("random.toml", "\n".join(lines)))


def makespan(name: str, sizes: dict[str, int], costs: Costs) -> float:
    inside = analyse(name, sizes, costs).inside
    assert inside is not None
    return inside.late_wait.makespan


def compared(row: Comparison, costs: Costs) -> Outcome:
    began = process_time()
    fixed = min(makespan(name, row.sizes, costs) for name in row.fixed)
    middle = process_time()
    policy = makespan(row.policy, {**row.sizes, **row.own}, costs)
    return Outcome(policy / fixed if fixed else 1.0, (process_time() - middle, middle - began))


def comparisons(tables: int, seed: int) -> Iterator[tuple[Comparison, Costs]]:
    draw = random.Random(seed)
    for _ in range(tables):
        row = comparison(draw)
        yield row, table(draw, row.chunks * row.sizes["P"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=int, default=30, metavar="N", help="random tables of cells")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = list(comparisons(options.tables, options.seed))
    outcomes = [compared(*row) for row in rows]
    ratios = [outcome.ratio for outcome in outcomes]
    policy, fixed = (sum(column) / len(outcomes) for column in zip(*(x.seconds for x in outcomes), strict=True))
    costs = load_costs(CELLS_TOML)
    figures: dict[str, Any] = {
        "tables": len(rows),
        "uneven": sum(len(set(costs.cell.blocks)) > 1 for _, costs in rows if costs.cell is not None),
        "worst_over_fixed": max(ratios),
        "best_over_fixed": min(ratios),
        "mean_over_fixed": sum(ratios) / len(ratios),
        "shorter": sum(ratio < 1 for ratio in ratios),
        "cells_toml": {
            name: makespan(name, {"P": 4, "M": 16}, costs) for name in ("adaptive_pipe", "interleaved_overlap")
        },
        "seconds": {"policy": policy, "fixed": fixed},
    }
    figures["comparisons"] = [
        {"policy": row.policy, **row.sizes, "over": " and ".join(row.fixed), "ratio": outcome.ratio}
        for (row, _), outcome in zip(rows, outcomes, strict=True)
    ]
    give(figures, options)


if __name__ == "__main__":
    main()
