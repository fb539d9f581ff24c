"""Measures what hot experts gain where tokens prefer some experts, and what they cost where tokens do not.

    python benchmarks/hot_experts.py [--json]

Four processes over gloo share the experts of a MoE transformer (DualPipeV on one pipeline rank, cells overlapped).
Routing is drawn: each token takes k experts, without repetition, with equal probabilities or with those of a Zipf law
(exponent 1.0 or 0.6). The popular experts of each layer are drawn, too.

Instrument: emulated device time (see `schedc_runtime.measure.emulated_device`) over real collectives of small tensors.

    segments   have the proportions of DeepSeek-V3's layer; the experts' time is proportional to the rows on the rank.
               Weight gradients of lent experts are computed, and count, with the input gradients
    exchanges  take the bytes of the rank that sends or gets most, over a link speed. At equal routing a dispatch takes
               `BALANCED` ms

Printed, for each routing and policy: the shortest of several steps, taken in turns, its gain, bytes, and experts lent.
A gain is the step time without hot experts over the step time with them, less one. Policies:

    0          no hot experts
    fixed      `hot 2 until imbalance < 1.2`
    auto       `hot auto`: as many as pay by bytes

Bytes are those that the communicators of all four ranks sent to other ranks in one step. They must equal the bytes that
follow from the drawn routing; any difference is an error.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.program import CellProgram, Half
from schedc.cell.schedule import cell_program
from schedc.ir.arrays import Int64
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.executor import Executor
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.counts import Shape, counts_of
from schedc_runtime.moe.hot import HotPolicy, Lending, choose_hot
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.stages import new_stage, stages_on
from schedc_runtime.ranks.mesh import Mesh, peer_groups
from schedc_runtime.stage.stage import Stage
from schedc_runtime.testing import pool
from schedc_runtime.transport import TorchTransport

RANKS, EXPERTS, TOP, TOKENS = 4, 16, 2, 256
WIDTH, INNER, ITEM = 16, 48, 4
"""Columns of a token, columns of an expert, and bytes of a number. An expert has the bytes of 3 * INNER rows."""
SEGMENTS = {"attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 0), "post": SegmentTimes(2, 2, 0)}
EXPERT = SegmentTimes(20, 20, 26)
"""Milliseconds of the experts of one layer, at the mean number of rows."""
MEAN = TOKENS * TOP
BALANCED = 9.0
"""Milliseconds of a dispatch in which all experts are equally popular."""
PER_ROW = BALANCED / (MEAN * (RANKS - 1) / RANKS)
ROUTING = 1.0
POLICIES = {"0": None, "fixed": HotPolicy(2, 1.2), "auto": HotPolicy()}
SKEWS = {"zipf10": 1.0, "zipf06": 0.6, "balanced": 0.0}


def drawn(layer: int, microbatch: int, exponent: float) -> Int64:
    """[ranks, tokens, k] experts of every rank's tokens."""
    popular = np.random.default_rng(layer).permutation(EXPERTS)
    share = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -exponent
    # The k largest of log(share) + Gumbel noise are a draw of k without repetition.
    noise = np.random.default_rng([layer, microbatch]).gumbel(size=(RANKS, TOKENS, EXPERTS))
    return np.asarray(popular[(np.log(share) + noise).argsort(-1)[..., : -TOP - 1 : -1]])


class Drawn(Router):
    """A router whose choices are prescribed for each microbatch; only its gate weights are learned."""

    def draw(self, rank: int, choices: list[Int64]) -> None:
        self.choices = [torch.from_numpy(np.ascontiguousarray(every[rank])) for every in choices]
        self.turn = 0

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, weight, shares = super().forward(tokens)
        self.turn += 1
        return self.choices[(self.turn - 1) % len(self.choices)], weight, shares


@dataclass(frozen=True)
class Traffic:
    """What one layer moves and computes for one microbatch.

    dispatched: rows that the busiest rank sends or gets in one dispatch. lent: the same in one exchange of hot experts'
    weights, in rows of equal bytes. own, borrowed: [ranks] rows that a rank's own experts, and its slots, compute.
    rows: [ranks] rows that a rank sends and gets. weights: [ranks] experts that a rank lends and borrows.
    hot: number of hot experts.
    """

    dispatched: float
    lent: float
    own: Int64
    borrowed: Int64
    rows: Int64
    weights: Int64
    hot: int

    @classmethod
    def of(cls, choices: Int64, policy: HotPolicy | None) -> Traffic:
        counts = counts_of(torch.from_numpy(choices), Shape(EXPERTS, 1, RANKS)).rows.long().numpy()
        local = EXPERTS // RANKS
        hot = choose_hot(counts, policy.resolved(local, INNER, ITEM)) if policy else ()
        lending = Lending(hot, RANKS, 0, local)
        borrowed = np.zeros(RANKS, dtype=np.int64)
        for rank in range(RANKS):
            slots = list(lending.lent_to(rank))
            borrowed[rank] = counts[rank, slots].sum()
            counts[rank, slots] = 0
        between = counts.reshape(RANKS, RANKS, local).sum(-1)
        out, into = between.sum(1) - between.diagonal(), between.sum(0) - between.diagonal()
        lent_by = np.array([len(lending.owned_by(rank)) for rank in range(RANKS)]) * (RANKS - 1)
        lent_to = np.array([len(lending.lent_to(rank)) for rank in range(RANKS)])
        return cls(
            float(max(out.max(), into.max())), 3 * INNER * float(max(lent_by.max(), lent_to.max())),
            between.sum(0), borrowed, out + into, lent_by + lent_to, len(hot),
        )  # fmt: skip


class DrawnTrafficDevice(Device):
    """A device on which experts take time by their rows, and exchanges by their bytes, as the routing was drawn."""

    rank: int
    traffic: dict[tuple[int, int, int], Traffic]
    """By stage, layer of the stage, microbatch."""

    def time(self, op: MicroStep, half: Half) -> float:
        node = op.stage.shape.nodes[op.node]
        if node.role not in ("experts", "dispatch", "combine", "hot"):
            return super().time(op, half)
        traffic = self.traffic[op.stage.index, node.layer, op.microbatch]
        if node.exchange:
            return (traffic.lent if node.role == "hot" else traffic.dispatched) * PER_ROW * self.unit
        own, borrowed = int(traffic.own[self.rank]), int(traffic.borrowed[self.rank])
        forward, input_gradient, weight_gradient = EXPERT
        total = {
            Half.FORWARD: (own + borrowed) * forward,
            Half.BACKWARD: (own + borrowed) * input_gradient + borrowed * weight_gradient,
            Half.WEIGHT: own * weight_gradient,
        }[half]
        return total / MEAN * self.unit


def costs(policy: HotPolicy | None) -> CellCosts:
    """The costs by which cells are ordered: times at equal routing, and of lending one expert."""
    lane: dict[str, SegmentTimes | float] = {
        "routing.node": SegmentTimes(ROUTING), "dispatch.node": BALANCED, "combine.node": BALANCED,
    }  # fmt: skip
    if policy is not None:
        lane["hot.node"] = 3 * INNER * (RANKS - 1) * PER_ROW
    return CellCosts.of({**SEGMENTS, "experts": EXPERT}, lane)


def model_of(layers: int) -> MoETransformer:
    config = MoEConfig(
        vocab=32, width=WIDTH, heads=2, dense_blocks=0, moe_blocks=layers, inner=8, expert_inner=INNER, query_rank=4,
        key_value_rank=4, plain=4, rotary=2, value=4, routing=RouterConfig(experts=EXPERTS, top=TOP),
    )  # fmt: skip
    return MoETransformer(config)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Variant:
    """One policy on this process. It has a model of its own, and shares the communicators with all variants."""

    def __init__(self, policy: HotPolicy | None, near: Any, transport: Any, options: dict[str, Any]) -> None:
        self.near, self.microbatches = near, options["microbatches"]
        program = schedc.compile("dualpipev", P=1, M=self.microbatches)
        torch.manual_seed(0)
        parts = partition(model_of(options["layers"] * program.stages), program.stages, placement=program.placement)
        rank = near.experts.rank
        self.tokens = torch.randint(0, 32, (self.microbatches, 1, TOKENS))
        boundaries = infer_boundaries(parts, (self.tokens[0],))
        held: dict[int, Stage] = {}
        self.traffic: dict[tuple[int, int, int], Traffic] = {}
        for index in stages_on(program, 0):
            shard_experts(parts.modules[index], near.experts, hot=policy)
            for number, (_, layer) in enumerate(moe_layers(parts.modules[index])):
                self._prescribe(layer, (index, number), rank, policy, options)
            held[index] = new_stage(parts, index, parts.modules[index], program, token_loss)
            held[index].bind(boundaries[index], boundaries[index + 1])
        cell_costs = costs(policy)

        def cells(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
            return cell_program(kind, forward, backward, cell_costs)

        self.device = DrawnTrafficDevice(cell_costs, options["unit"])
        self.device.rank, self.device.traffic = rank, self.traffic
        code = self.device.code(bind(program, 0, held, boundaries, cells=cells))
        self.executor = Executor(program, code, transport, torch.device("cpu"))

    def _prescribe(
        self, layer: Any, place: tuple[int, int], rank: int, policy: HotPolicy | None, options: dict[str, Any]
    ) -> None:
        choices = [drawn(100 * place[0] + place[1], m, options["exponent"]) for m in range(self.microbatches)]
        layer.router = Drawn(WIDTH, layer.router.routing)
        layer.router.draw(rank, choices)
        self.traffic |= {(*place, m): Traffic.of(every, policy) for m, every in enumerate(choices)}

    def step(self) -> tuple[float, int]:
        """Seconds of a step, and bytes that this rank sent to other ranks."""
        before = self._sent()
        self.executor.start([(x,) for x in self.tokens], list(self.tokens), 1 / self.microbatches, probing=False)
        dist.barrier()
        self.device.begin()
        began = perf_counter()
        self.executor.advance()
        self.executor.finish()
        return perf_counter() - began, self._sent() - before

    def lent(self) -> float:
        """Mean number of hot experts over layers and microbatches."""
        return float(np.mean([traffic.hot for traffic in self.traffic.values()]))

    def _sent(self) -> int:
        sent = self.near.experts.expert.sent
        return int(sum(sent) - sent[self.near.experts.rank])

    def expected(self) -> int:
        """Bytes that this rank sends by the drawn routing: rows both ways, gate weights, and weights of experts."""
        rank, row = self.near.experts.rank, WIDTH * ITEM
        rows = sum(int(traffic.rows[rank]) for traffic in self.traffic.values())
        weights = sum(int(traffic.weights[rank]) for traffic in self.traffic.values())
        routing = len(self.traffic) * (RANKS - 1) * TOKENS * TOP * 2
        return rows * (2 * row + ITEM) + weights * 3 * INNER * row + routing


def rank_of_steps(
    rank: int, world_size: int, exponent: float, microbatches: int, layers: int, unit: float, repetitions: int
) -> dict[str, list[float]]:
    """By policy: seconds of every measured step of this process, bytes that it sent in the last, and experts lent."""
    options = {"exponent": exponent, "microbatches": microbatches, "layers": layers, "unit": unit}
    near = peer_groups(Mesh(1, RANKS), Mesh(1, RANKS).coordinate(rank), 60.0)
    transport = TorchTransport(dist.new_group([rank], use_local_synchronization=True), 60.0)
    variants = {name: Variant(policy, near, transport, options) for name, policy in POLICIES.items()}
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in variants}
    for _ in range(1 + repetitions):  # the first step warms up connections and allocations
        for name, variant in variants.items():
            steps[name].append(variant.step())
            if steps[name][-1][1] != variant.expected():
                raise SystemExit(f"{name}: {steps[name][-1][1]} bytes were counted, {variant.expected()} expected")
    return {
        name: [*[time for time, _ in measured[1:]], float(measured[-1][1]), float(variants[name].lent())]
        for name, measured in steps.items()
    }


def measure(exponent: float, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By policy: milliseconds of the step on its slowest rank, bytes of all ranks, and experts lent per layer."""
    ranks = pool(RANKS).run(
        "hot_experts:rank_of_steps", timeout=600, exponent=exponent, microbatches=options.microbatches,
        layers=options.layers, unit=options.unit * 1e-3, repetitions=options.repetitions,
    )  # fmt: skip
    figures = {}
    for name in POLICIES:
        times = [max(step) for step in zip(*(rank[name][:-2] for rank in ranks), strict=True)]
        figures[name] = {
            "ms": 1e3 * min(times),
            "bytes": sum(rank[name][-2] for rank in ranks),
            "lent_per_layer": ranks[0][name][-1],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What hot experts gain, in emulated device time.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="MoE blocks per stage, of two stages")
    parser.add_argument("--repetitions", type=int, default=3, help="steps of each policy, of which the shortest counts")
    parser.add_argument("--unit", type=float, default=1.0, help="milliseconds of one unit of the table of times")
    options = parser.parse_args()
    results = {skew: measure(exponent, options) for skew, exponent in SKEWS.items()}
    gains = {f"gain_{skew}": figures["0"]["ms"] / figures["auto"]["ms"] - 1 for skew, figures in results.items()}
    fixed = {f"fixed_gain_{skew}": figures["0"]["ms"] / figures["fixed"]["ms"] - 1 for skew, figures in results.items()}
    if options.json:
        print(json.dumps({**gains, **fixed, "policies": results}))
        return
    print("emulated device time, 4 expert ranks over gloo; gain: time without hot experts over time with, less one")
    print(f"{'routing':>9} {'hot':>6} {'ms':>8} {'gain':>7} {'MB sent':>9} {'lent per layer and microbatch':>30}")
    for skew, figures in results.items():
        for name, x in figures.items():
            gain = figures["0"]["ms"] / x["ms"] - 1
            print(
                f"{skew:>9} {name:>6} {x['ms']:8.1f} {100 * gain:6.1f}% {x['bytes'] / 1e6:9.3f}"
                f" {x['lent_per_layer']:30.2f}"
            )


if __name__ == "__main__":
    main()
