"""Measures what hot experts gain where tokens prefer some experts, and what they cost where tokens do not.

    python benchmarks/hot_experts.py [--json]

Four processes over gloo share the experts of a MoE transformer (DualPipeV on one pipeline rank, cells overlapped).
Routing is drawn: each token takes k experts, without repetition, with equal probabilities or with those of a Zipf law
(exponent 1.0 or 0.6). The popular experts of each layer are drawn, too.

Instrument: emulated device time (see `schedc_runtime.measure.emulated_device`) over real collectives of small tensors.

    segments   have the proportions of DeepSeek-V3's layer; the experts' time is proportional to the rows on the rank
    exchanges  take the bytes of the rank that sends or gets most, over a link speed. At equal routing a dispatch takes
               `BALANCED` ms

              broadcasts and returns of hot experts stand in the same queue

Every step draws anew, so that the rows of the last step only resemble those of this one. Printed, for each routing and
policy: the shortest of several steps, taken in turns, its gain, bytes, and experts lent. A gain is the step time
without hot experts over the step time with them, less one. The first step, which lends none, is left out. Policies:

    0          no hot experts
    fixed      `hot 2 until imbalance < 1.2`
    auto       `hot auto`: as many as pay, by the times of segments and exchanges

Bytes are those that the communicators of all four ranks sent to other ranks in one step. They must equal the bytes that
follow from the drawn routing; any difference is an error. `slot_bytes_over_prediction` is what the slots of all ranks
really hold, over the plan's closed form for as many slots. `owner_copies` is what owners hand to broadcasts, over the
weights that they lend.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from drawn_traffic import (
    BALANCED,
    EXPERT,
    EXPERTS,
    INNER,
    ITEM,
    RANKS,
    ROUTING,
    SEGMENTS,
    TOKENS,
    TOP,
    WIDTH,
    Drawn,
    DrawnTrafficDevice,
    Traffic,
    drawn,
)
from figures import give, parser_of
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.program import CellProgram
from schedc.cell.schedule import cell_program
from schedc.ir.arrays import Int64
from schedc.ir.plan import ExpertSizes, Plan
from schedc.plan.counts.layers import moe_layer
from schedc_runtime.data_parallel.hot_returns import with_hot_returns
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.executor import Executor
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.hot import Lending
from schedc_runtime.moe.hot_choice import HotPolicy
from schedc_runtime.moe.hot_slots import HotLender
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.build.stages import new_stage, stages_on
from schedc_runtime.pipeline.step.hot_steps import HotSteps
from schedc_runtime.ranks.mesh import Coordinate, Mesh, peer_groups
from schedc_runtime.stage.stage import Stage
from schedc_runtime.testing import pool
from schedc_runtime.transport.collective_calls import shares
from schedc_runtime.transport.distributed import TorchTransport

SKEWS = {"zipf_1.0": 1.0, "zipf_0.6": 0.6, "balanced": 0.0}
WARM = 2
"""Steps that are not measured: the first lends none, the second allocates the slots."""
COSTS = CellCosts.of(
    {**SEGMENTS, "experts": EXPERT},
    {"routing.node": SegmentTimes(ROUTING), "dispatch.node": BALANCED, "combine.node": BALANCED},
)
"""The costs by which cells are ordered and copies are judged: times at equal routing."""
POLICIES = {"0": None, "fixed": HotPolicy(2, 1.2, costs=COSTS), "auto": HotPolicy(costs=COSTS)}


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

    costs = COSTS
    """The times by which cells are ordered."""

    def __init__(self, policy: HotPolicy | EvenRows | None, near: Any, transport: Any, options: dict[str, Any]) -> None:
        self.near, self.microbatches, self.steps = near, options["microbatches"], 0
        program = schedc.compile("dualpipev", P=1, M=self.microbatches)
        torch.manual_seed(0)
        parts = partition(model_of(options["layers"] * program.stages), program.stages, placement=program.placement)
        rank = near.experts.rank
        self.tokens = torch.randint(0, 32, (self.microbatches, 1, TOKENS))
        boundaries = infer_boundaries(parts, (self.tokens[0],))
        self.device = DrawnTrafficDevice(COSTS, options["unit"], SharedStarts.of_processes(Mesh(1, RANKS), rank))
        self.device.rank, self.device.copies = rank, {}
        self.choices: dict[tuple[int, int], list[Int64]] = {}
        self.layers: dict[tuple[int, int], MoELayer] = {}
        held: dict[int, Stage] = {}
        for index in stages_on(program, 0):
            shard_experts(
                parts.modules[index], near.experts, **{"even" if isinstance(policy, EvenRows) else "hot": policy}
            )
            for number, (_, layer) in enumerate(moe_layers(parts.modules[index])):
                self._prescribe(layer, (index, number), rank, options)
            held[index] = new_stage(parts, index, parts.modules[index], program, token_loss)
            held[index].bind(boundaries[index], boundaries[index + 1])
        self.hot = HotSteps({Coordinate(0, rank): held}, program, RANKS, cast(Any, None))

        def cells(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
            return cell_program(kind, forward, backward, self.costs)

        bound = bind(program, 0, held, boundaries, cells=cells)
        code = with_hot_returns(self.device.code(bound), held, summed=False)
        self.executor = Executor(program, code, transport, torch.device("cpu"))

    def _prescribe(self, layer: MoELayer, place: tuple[int, int], rank: int, options: dict[str, Any]) -> None:
        turns = range(self.microbatches * (WARM + options["repetitions"]))
        choices = [drawn(100 * place[0] + place[1], turn, options["exponent"]) for turn in turns]
        layer.router = Drawn(WIDTH, layer.router.routing)
        layer.router.draw(rank, choices)
        self.choices[place], self.layers[place] = choices, layer
        if layer.lender is not None:
            self.device.carries(layer.lender, *place)

    def step(self) -> tuple[float, int, int]:
        """Seconds of a step, bytes that this rank sent to other ranks, and those that were to be sent."""
        hot = {
            place: layer.lender.chosen() if isinstance(layer.lender, HotLender) else ()
            for place, layer in self.layers.items()
        }
        first = self.steps * self.microbatches
        self.device.traffic = {
            (*place, m): Traffic.of(choices[first + m], hot[place])
            for place, choices in self.choices.items()
            for m in range(self.microbatches)
        }
        self.lent = [len(each) for each in hot.values()]
        rank = self.near.experts.rank
        self.owned = sum(len(Lending(each, RANKS, rank, EXPERTS // RANKS).places) for each in hot.values())
        before = self._sent()
        self.executor.start([(x,) for x in self.tokens], list(self.tokens), 1 / self.microbatches, probing=False)
        dist.barrier()
        self.device.begin()
        with self.hot.step(True):
            self.executor.advance()
            self.executor.finish()
            took = self.device.clock
            self.slots = sum(layer.lender._slots.nbytes for layer in self.layers.values() if layer.lender)
        self.hot.commit()
        self.steps += 1
        return took, self._sent() - before, self.expected(list(hot.values()))

    def _sent(self) -> int:
        sent = self.near.experts.expert.sent
        return int(sum(sent) - sent[self.near.experts.rank])

    def expected(self, hot: Sequence[tuple[int, ...]]) -> int:
        """Bytes that this rank sends by the drawn routing: rows both ways, gate weights, counts, weights, gradients."""
        rank, row = self.near.experts.rank, WIDTH * ITEM
        rows = sum(int(traffic.rows[rank]) for traffic in self.device.traffic.values())
        counts = sum(EXPERTS + RANKS * len(each) + 2 for each in hot) * 4 * (RANKS - 1) * self.microbatches
        return rows * (2 * row + ITEM) + counts + sum(self._moved(each, rank) for each in hot)

    def _moved(self, hot: tuple[int, ...], rank: int) -> int:
        """Bytes that this rank sends for the hot experts of a layer."""
        lending, sent = Lending(hot, RANKS, rank, EXPERTS // RANKS), 0
        for owner in range(RANKS):
            for numbers in (2 * INNER * WIDTH, INNER * WIDTH):
                each = len(lending.owned_by(owner)) * numbers
                if owner == rank:
                    sent += each * ITEM * (RANKS - 1)
                else:
                    parts = shares(each, RANKS)
                    sent += sum(parts) * ITEM  # a share of its own stays, and the sum of that share goes to the owner
        return sent

    def held(self) -> tuple[int, int]:
        """Bytes that the slots of this rank hold, and the closed form for as many."""
        sizes = ExpertSizes(EXPERTS, TOP, width=INNER, hidden=WIDTH)
        layer = moe_layer(Plan(dtype="fp32"), sizes)
        each = layer.slot_bytes + layer.slot_gradient_bytes
        slots = sum(len(layer.lender._slots.weights[0]) for layer in self.layers.values() if layer.lender and self.slots
                    and layer.lender._slots.weights)  # fmt: skip
        return self.slots, slots * each


class Broadcasts:
    """Counts the bytes that a rank hands to broadcasts of its own: a communicator that passes everything on."""

    def __init__(self, communicator: Any) -> None:
        self.handed = 0
        begin = communicator.broadcast

        def broadcast(tensor: Tensor, source: int, label: str = "") -> Any:
            self.handed += tensor.nbytes * (source == communicator.rank)
            return begin(tensor, source, label)

        communicator.broadcast = broadcast


def rank_of_steps(
    rank: int, world_size: int, exponent: float, microbatches: int, layers: int, unit: float, repetitions: int
) -> dict[str, dict[str, Any]]:
    """By policy: seconds of every measured step of this process, and what it sent, lent and held."""
    options = {
        "exponent": exponent, "microbatches": microbatches, "layers": layers, "unit": unit, "repetitions": repetitions
    }  # fmt: skip
    near = peer_groups(Mesh(1, RANKS), Mesh(1, RANKS).coordinate(rank), 60.0)
    transport = TorchTransport(dist.new_group([rank], use_local_synchronization=True), 60.0)
    broadcasts = Broadcasts(near.experts.expert)
    variants = {name: Variant(policy, near, transport, options) for name, policy in POLICIES.items()}
    figures: dict[str, dict[str, Any]] = {name: {"times": [], "lent": [], "owned": 0, "handed": 0} for name in variants}
    for number in range(WARM + repetitions):
        for name, variant in variants.items():
            handed = broadcasts.handed
            time, sent, expected = variant.step()
            if sent != expected:
                raise SystemExit(f"{name}: {sent} bytes were counted, {expected} expected")
            figure = figures[name]
            figure["handed"] += broadcasts.handed - handed
            figure["owned"] += variant.owned * 3 * INNER * WIDTH * ITEM
            if number >= WARM:
                figure["times"].append(time)
                figure["lent"] += variant.lent
            figure |= {"bytes": sent, "held": variant.held()}
    return figures


def measure(exponent: float, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By policy: milliseconds of the step on its slowest rank, bytes of all ranks, and experts lent per layer."""
    ranks = pool(RANKS).run(
        "hot_experts:rank_of_steps", timeout=600, exponent=exponent, microbatches=options.microbatches,
        layers=options.layers, unit=options.unit * 1e-3, repetitions=options.repetitions,
    )  # fmt: skip
    figures = {}
    for name in POLICIES:
        each = [rank[name] for rank in ranks]
        figures[name] = {
            "ms": 1e3 * min(max(step) for step in zip(*(rank["times"] for rank in each), strict=True)),
            "bytes": sum(rank["bytes"] for rank in each),
            "lent_per_layer": float(np.mean(each[0]["lent"])),
            "held": sum(rank["held"][0] for rank in each),
            "held_predicted": sum(rank["held"][1] for rank in each),
            "handed": sum(rank["handed"] for rank in each),
            "owned": sum(rank["owned"] for rank in each),
        }
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="MoE blocks per stage, of two stages")
    parser.add_argument("--repetitions", type=int, default=3, help="steps of each policy, of which the shortest counts")
    parser.add_argument("--unit", type=float, default=2.0, help="milliseconds of one unit of the table of times")
    options = parser.parse_args()
    results = {skew: measure(exponent, options) for skew, exponent in SKEWS.items()}
    gains = {
        name: {skew: {"gain": figures["0"]["ms"] / figures[name]["ms"] - 1} for skew, figures in results.items()}
        for name in ("fixed", "auto")
    }
    total = {
        key: sum(figures[name][key] for figures in results.values() for name in POLICIES)
        for key in ("held", "held_predicted", "handed", "owned")
    }
    memory = {
        "slot_bytes_over_prediction": total["held"] / total["held_predicted"],
        "owner_copies": total["handed"] / total["owned"],
    }
    give({**gains, **memory, "policies": results}, options)


if __name__ == "__main__":
    main()
