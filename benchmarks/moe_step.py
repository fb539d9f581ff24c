"""Measures what each optimization of a plan does to step time and loss of a toy model in the shape of DeepSeek-V3.

    python benchmarks/moe_step.py [--json] [--steps 24] [--regimes balanced,skewed] [--only overlap,capacity]

Four processes over gloo: DualPipeV on a pipeline of two ranks, each an expert group of two nodes of one rank. The model
has a dense block, seven MoE blocks with a shared expert and 8 of 32 routed experts, and multi-token prediction. It
learns to count (sequences with random starts and strides). Every variant trains the same model on the same data: all
optimizations off, each alone, all together. Printed for each variant:

    step_ms    the shortest timed step, by emulated device time (`schedc_runtime.measure.emulated_device`), from the
               begin of a step until the last segment ends on the slowest rank.
               Segments have the proportions of DeepSeek-V3's layer (attention 20, shared expert 6, experts 20; backward
               20 + 18, 12, 20 + 26). Experts take time by the rows that they really got, padding included. Exchanges
               take time by the bytes that they really sent to the other node; a flat dispatch, uniformly routed, 16
    loss       the mean loss of the last ten steps, really computed. same: whether all losses equal those of `off`, bit
               by bit. deviation: of the mean from the mean of `off`
    dropped    share of the choices of experts that a capacity dropped
    fullest    rows of the fullest rank over the mean of both, averaged over layers, microbatches and timed steps

There are two regimes. balanced: routers as they are initialised, whose load is nearly even. skewed: every router begins
with biases that fall with the logarithm of an expert's popularity (`SKEW`), in an order drawn per layer. It moves the
biases against the load like any other router. The skewed regime is thus a run before balancing has had its effect.

A variant that drops nothing and adds nothing in another order must have the losses of `off`. The others must be within
1 %. A variant that drops under skewed routing is exempt, since its drops follow from the skew: its deviation is printed
only.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from figures import give, parser_of

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Half
from schedc.plan import Capacity, Drop, Hot, Level, Method, Plan, Recompute
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.gpt import counting_sequences
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, multi_token_loss
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.testing import pool

RANKS, EXPERT_RANKS, MICROBATCHES = 2, 2, 8
ROWS, TOKENS, WIDTH, VOCAB = 2, 32, 32, 64
ROUTING = RouterConfig(32, 8, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True, bias_rate=0.01, balance=1e-3)
SEGMENTS = {
    "attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 6),
    "experts": SegmentTimes(20, 20, 26), "post": SegmentTimes(2, 2, 0),
    "dense": SegmentTimes(40, 40, 38), "permute": SegmentTimes(1, 1, 0),
    "relay": SegmentTimes(1, 1, 0), "relay_back": SegmentTimes(1, 1, 0),
}  # fmt: skip
"""Milliseconds of one layer. The experts' times hold at the mean number of rows."""
FLAT = 16.0
"""Milliseconds of a dispatch that sends a row for each chosen expert, under uniform routing."""
LATENCY = 0.5
FLAT_BYTES = ROWS * TOKENS * ROUTING.top * (EXPERT_RANKS - 1) / EXPERT_RANKS * (WIDTH + 1) * 4
MEAN_ROWS = ROWS * TOKENS * ROUTING.top

DROPPING = Capacity(1.25, Drop.PROBS)
LENT = Hot(2, 1.2, by_microbatch=True)  # an exchange of the cell, whose time the instrument knows
RECOMPUTED = (Recompute(Level.MEDIUM),) * 2 * RANKS
VARIANTS: dict[str, Plan] = {
    "off": Plan(),
    "overlap": Plan(overlap=True),
    "alltoall": Plan(method=Method.AUTO),
    "capacity": Plan(capacity=DROPPING),
    "hot": Plan(hot=LENT),
    "recompute": Plan(recompute=RECOMPUTED),
    "all": Plan(overlap=True, method=Method.AUTO, capacity=DROPPING, hot=LENT, recompute=RECOMPUTED),
    "all but capacity": Plan(overlap=True, method=Method.AUTO, hot=LENT, recompute=RECOMPUTED),
}
REORDERED = ("hot", "all but capacity")
"""Variants that drop nothing, but add in another order."""
REGIMES = {
    "balanced": tuple(VARIANTS),
    "skewed": ("off", "overlap", "capacity", "hot", "all", "all but capacity"),
}
"""Variants by regime, which is the way routing begins."""
SKEW = 0.2
"""The distance of an expert's bias from that of an expert e times as popular; scores are between 0 and 1."""


@dataclass
class CountedTrafficDevice(Device):
    """A device on which experts take time by their rows, and exchanges by their bytes, as counted while training."""

    group: ExpertGroup = field(default_factory=ExpertGroup.solo)
    moved: int = 0
    planned: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rows that the experts have got so far, by stage and layer."""
    rows: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Rows by stage, layer and microbatch."""
    taken: list[int] = field(default_factory=list)
    """Rows of every layer and microbatch, in the order in which they run, which all expert ranks share."""

    def time(self, op: MicroStep, half: Half) -> float:
        node = op.stage.shape.nodes[op.node]
        layer = (op.stage.index, node.layer)
        if node.exchange:
            before, self.moved = self.moved, self.group.bytes_leaving_node()
            return (LATENCY + FLAT * (self.moved - before) / FLAT_BYTES) * self.unit
        if node.role == "permute" and half is Half.FORWARD:
            planner = [each for _, each in moe_layers(op.stage.module)][node.layer].planner
            before, self.planned[layer] = self.planned.get(layer, 0), int(planner.padded_rows)
            self.rows[*layer, op.microbatch] = max(0, self.planned[layer] - before)
            self.taken.append(self.rows[*layer, op.microbatch])
        share = self.rows.get((*layer, op.microbatch), MEAN_ROWS) / MEAN_ROWS if node.role == "experts" else 1.0
        return super().time(op, half) * share


def costs_of(plan: Plan) -> CellCosts:
    """The costs by which cells are ordered: the table, and exchanges at uniform routing."""
    rows = FLAT if plan.method is Method.FLAT else 2 * FLAT / ROUTING.top
    lanes = {f"{label}.rail": LATENCY + rows for label in ("dispatch", "combine")}
    return CellCosts.of(
        SEGMENTS, {**lanes, "routing.rail": SegmentTimes(LATENCY), "dispatch.node": 0.5, "combine.node": 0.5}
    )


def model_of(skewed: bool) -> MoETransformer:
    torch.manual_seed(0)
    config = MoEConfig(
        vocab=VOCAB, width=WIDTH, moe_blocks=7, inner=64, expert_inner=8, routing=ROUTING, query_rank=16,
        key_value_rank=8, plain=8, rotary=4, value=8, multi_token=True,
    )  # fmt: skip
    model = MoETransformer(config)
    generator = torch.Generator().manual_seed(0)
    for _, layer in moe_layers(model):
        if skewed and layer.router.bias is not None:
            popularity = torch.randperm(ROUTING.experts, generator=generator) + 1
            layer.router.bias.copy_(-SKEW * popularity.log())
    return model


def rank_of_run(
    rank: int, world_size: int, variant: str, skewed: bool, steps: int, timed: int, unit: float
) -> dict[str, Any]:
    """Losses of all steps on this process, emulated seconds of the timed steps, and counts of choices and rows."""
    plan = VARIANTS[variant]
    program = schedc.compile("dualpipev", P=RANKS, M=MICROBATCHES)
    mesh = Mesh(RANKS, EXPERT_RANKS, per_node=1)
    costs = costs_of(plan)
    model = model_of(skewed)
    pipe = Pipeline(model, program, loss_fn=multi_token_loss(), mesh=mesh, plan=plan, cells=costs, timeout=120)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    layers = [layer for stage in pipe.held(pipe.places[0]) for _, layer in moe_layers(stage.module)]
    starts = SharedStarts.of_processes(mesh, rank)
    device = CountedTrafficDevice(costs=costs, unit=unit, starts=starts, group=layers[0].routing.group)
    losses, seconds, dropped, choices = [], [], 0, 0
    plain: list[tuple[Any, Any]] = []
    for step in range(steps):
        emulated = 1 <= step <= timed  # the first step binds, and warms up connections
        if emulated:
            plain = emulate(pipe, device, plain)
            dist.barrier()
            device.moved = device.group.bytes_leaving_node()
            device.planned.clear()
            device.begin()
        optimizer.zero_grad()
        seed = step * mesh.replicas + pipe.replica
        losses.append(pipe.step(*counting_sequences(ROWS * MICROBATCHES, TOKENS, seed, VOCAB)).item())
        if emulated:
            seconds.append(device.clock)
        if step == timed:
            for executor, code in plain:
                executor.code = code
        optimizer.step()
        dropped += sum(layer.statistics.dropped for layer in layers)
        choices += sum(layer.statistics.choices for layer in layers)
        pipe.update_biases()
    pipe.close()
    return {"losses": losses, "seconds": seconds, "dropped": dropped, "choices": choices, "rows": device.taken}


def emulate(pipe: Pipeline, device: Device, done: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Makes the bound executors of a pipeline run in emulated time; returns (executor, its own code) to restore."""
    if done:
        return done
    bound = [executor for code in pipe._bound_code._bound.values() for executor in code.executors.values()]
    plain = [(executor, executor.code) for executor in bound]
    for executor, code in plain:
        executor.code = device.code(code)
    return plain


def measure(variant: str, skewed: bool, options: argparse.Namespace) -> dict[str, Any]:
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "moe_step:rank_of_run", timeout=1200, variant=variant, skewed=skewed, steps=options.steps, timed=options.timed,
        unit=options.unit * 1e-3,
    )  # fmt: skip
    slowest = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        "step_ms": 1e3 * min(slowest) / options.unit,
        "losses": ranks[0]["losses"],
        "fullest": fullest([rank["rows"] for rank in ranks]),
        "dropped": sum(rank["dropped"] for rank in ranks) / sum(rank["choices"] for rank in ranks),
    }


def fullest(rows: list[list[int]]) -> float:
    """The rows of the fullest rank over the mean of its expert group, averaged over exchanges.

    rows: [processes] rows of every layer and microbatch; neighbouring processes share the experts.
    """
    groups = [rows[first : first + EXPERT_RANKS] for first in range(0, len(rows), EXPERT_RANKS)]
    ratios = [max(same) * len(same) / sum(same) for group in groups for same in zip(*group, strict=True) if sum(same)]
    return sum(ratios) / len(ratios)


def compared(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every variant, compared with `off`."""
    base = results["off"]
    end = last(base)
    return {
        name: {
            "step_ms": x["step_ms"], "speedup": base["step_ms"] / x["step_ms"], "loss": last(x),
            "same": x["losses"] == base["losses"], "deviation": abs(last(x) - end) / end, "dropped": x["dropped"],
            "fullest": x["fullest"], "losses": x["losses"],
        }
        for name, x in results.items()
    }  # fmt: skip


def last(result: dict[str, Any]) -> float:
    losses = result["losses"][-10:]
    return float(sum(losses) / len(losses))


def faults(table: dict[str, Any], skewed: bool) -> list[str]:
    """Variants whose losses deviate from `off` more than they may."""
    dropping = {name for name in table if VARIANTS[name].capacity is not None}
    exact = {name for name in table if name not in dropping and name not in REORDERED}
    judged = [name for name in table if not skewed or name not in dropping]
    return [name for name in judged if (not table[name]["same"] if name in exact else table[name]["deviation"] > 0.01)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=24, help="training steps of every variant")
    parser.add_argument("--timed", type=int, default=2, help="steps in emulated device time, of which the best counts")
    parser.add_argument("--unit", type=float, default=0.5, help="milliseconds that a millisecond of the table takes")
    parser.add_argument("--only", default="", help="names of variants, with commas; `off` is always run")
    parser.add_argument("--regimes", default="balanced,skewed", help="how routing begins")
    options = parser.parse_args()
    for names, table in ((options.regimes, REGIMES), (options.only, VARIANTS)):
        if unknown := {name for name in names.split(",") if name} - table.keys():
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(table)}")
    results = {regime: run(regime, options) for regime in options.regimes.split(",")}
    wrong = [name for regime, table in results.items() for name in faults(table, regime == "skewed")]
    tables = {"variants": results.get("balanced", {}), "skewed": results.get("skewed", {}), "faults": wrong}
    speedups = (tables[name].get("all", {}).get("speedup") for name in ("variants", "skewed"))
    give({**tables, **dict(zip(("all_speedup", "skewed_all_speedup"), speedups, strict=True))}, options)
    if wrong:
        sys.exit(f"losses that are not what they must be: {', '.join(wrong)}")


def run(regime: str, options: argparse.Namespace) -> dict[str, Any]:
    """The variants of a regime, compared with `off`."""
    variants = REGIMES[regime]
    wanted = options.only.split(",") if options.only else variants
    chosen = ["off", *(name for name in variants if name in wanted and name != "off")]
    return compared({name: measure(name, regime == "skewed", options) for name in chosen})


if __name__ == "__main__":
    main()
