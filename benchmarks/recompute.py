"""Counts the bytes that recomputation saves and the FLOPs that it adds, and compares them with the closed forms.

    python benchmarks/recompute.py [--json]

Four ranks, two nodes of two, share the experts, all in this process, in float32.

Instrument: counts, which are the same on any machine. Bytes are those of storages that autograd and the runtime refer
to when the backward of a microbatch begins, without parameters, as `schedc_runtime.measure.held_bytes` counts them.
FLOPs are those of products, by torch.utils.flop_counter.

Printed in three tables:

    levels     per level, token and layer: bytes not held and FLOPs added, counted and in closed form
    adaptive   one layer whose routing is drawn by Zipf's law, with an exponent that falls to zero from step to step.
               Peak is the largest number of bytes that a rank holds of a microbatch. The cap is the number of bytes
               that a rank would hold with as many rows as the threshold allows, all kept: a point on the line through
               what ranks hold without recomputation
    worst      after balanced steps, in which nothing is recomputed, all tokens of all ranks go to the experts of one
               rank. Bounds are those by which the compiler checks a plan's memory: of the bytes kept, and of the bytes
               recomputed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from figures import give, parser_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import schedc
from schedc.ir.plan import By, Level, Recompute
from schedc.plan import ExpertSizes, Method, Plan
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.rows import worst_case_rows
from schedc.step.costs import exchange
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.moe.counts import Shape, ascending, counts_of_experts
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.planner import arrivals_of
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.moe.routes import plan_route

WIDTH, INNER, EXPERTS, TOP, SHARED = 64, 48, 32, 4, 1
TOKENS = 256
"""Tokens of a microbatch on a rank."""
MESH = Mesh(1, experts=4, per_node=2)
LAYERS = 2
THRESHOLD = 1.5
EXPONENTS = (1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0)


class ExpertBlock(nn.Module):
    """A norm, a linear layer in place of an attention, and experts behind another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = expert_layer(SHARED)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        output: Tensor = x + self.mlp(self.second(x))
        return output


class Steered(nn.Module):
    """Experts that the first columns of a token choose, whatever was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = expert_layer(0)
        self.mlp.router.weight.data.copy_(torch.eye(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.mlp(x)
        return output


def expert_layer(shared: int) -> MoELayer:
    part = GatedMLP(WIDTH, shared * INNER) if shared else None
    return MoELayer(Router(WIDTH, RouterConfig(EXPERTS, TOP)), Experts(EXPERTS, WIDTH, INNER), part)


@dataclass
class Counted:
    """Counts of one step.

    saved: [microbatches * ranks] bytes that autograd saved. held: the same and the bytes that the runtime holds.
    restored: [segments] bytes that were recomputed, whenever a segment is differentiated. flops: of all ranks.
    """

    saved: list[int]
    held: list[int]
    restored: list[int]
    flops: int = 0


class Counter:
    """Four pipelines of one rank each that share their experts, whose bytes are counted when a backward begins."""

    def __init__(self, blocks: Sequence[nn.Module], recompute: Recompute, method: Method) -> None:
        plan = Plan(recompute=(recompute,), method=method)
        program = schedc.compile("1f1b", P=1, M=1)
        model = nn.Sequential(*blocks)
        self.pipe = Pipeline(
            model, program, loss_fn=functional.mse_loss, mesh=MESH, in_process=True, plan=plan, cut=Cut(blocks="")
        )
        self.counted = Counted([], [], [])
        for place in self.pipe.places:
            (stage,) = self.pipe.held(place)
            stage.set_recomputation(recompute, count=True)
            self._watch(stage)

    def _watch(self, stage: Any) -> None:
        begin = stage.begin_backward

        def begin_backward(microbatch: int, gradients: Any = ()) -> None:
            bytes_held = held(stage, microbatch)
            self.counted.saved.append(sum(bytes_held.saved.values()))
            self.counted.held.append(bytes_held.total)
            begin(microbatch, gradients)

        differentiate = stage._differentiate_segment

        def differentiated(microbatch: int, *args: Any) -> None:
            self.counted.restored.append(held(stage, microbatch).restored)
            differentiate(microbatch, *args)

        stage.begin_backward, stage._differentiate_segment = begin_backward, differentiated

    def step(self, batch: Tensor) -> Counted:
        self.counted = Counted([], [], [])
        self.pipe.zero_grad()
        with FlopCounterMode(display=False) as flops:
            self.pipe.step(batch, torch.zeros_like(batch))
        self.counted.flops = flops.get_total_flops()
        return self.counted


def levels(method: Method) -> Iterator[dict[str, Any]]:
    """Per level, token and layer: bytes that are not held, and FLOPs added, counted and in closed form."""
    sizes = ExpertSizes(EXPERTS, TOP, shared=SHARED, width=INNER, hidden=WIDTH)
    routing = exchange.Routing(EXPERTS, TOP)
    nodes = MESH.experts // MESH.per_node
    arrive = exchange.arrivals(method, routing, exchange.Topology(nodes, MESH.per_node))
    batch = torch.randn(TOKENS * MESH.experts, WIDTH, generator=torch.Generator().manual_seed(1))
    per = TOKENS * MESH.experts * LAYERS
    none = None
    for level in Level:
        torch.manual_seed(0)
        counted = Counter([ExpertBlock() for _ in range(LAYERS)], Recompute(level), method).step(batch)
        none = none or counted
        closed = replace(moe_layer(Plan(dtype="fp32"), sizes), arriving=arrive).saving(level)
        yield {
            "level": level.value,
            "method": method.value,
            "bytes_saved": (sum(none.saved) - sum(counted.saved)) / per,
            "bytes_saved_closed": closed.bytes,
            "bytes_held": sum(counted.held) / per,
            "extra_flops": (counted.flops - none.flops) / per,
            "extra_flops_closed": closed.flops,
        }


def steered(exponent: float, seed: int) -> Tensor:
    """[tokens of all ranks, WIDTH] Tokens whose experts are drawn without replacement by Zipf's law."""
    generator = np.random.default_rng(seed)
    tokens = generator.normal(size=(TOKENS * MESH.experts, WIDTH)) / 10
    likely = -exponent * np.log(np.arange(1, EXPERTS + 1))
    tokens[:, :EXPERTS] = likely + generator.gumbel(size=(len(tokens), EXPERTS))
    return torch.from_numpy(tokens).float()


def rows_of(batch: Tensor) -> list[float]:
    """[ranks] Rows of each rank over the mean, by the choices of the router."""
    index = batch[:, :EXPERTS].topk(TOP).indices.view(MESH.experts, TOKENS, TOP)
    counts = counts_of_experts(index, Shape(EXPERTS, 1, MESH.experts))
    sizes = plan_route(ascending(index[0], EXPERTS), counts).sizes
    return [arrivals_of(sizes, TOP).imbalance(rank) for rank in range(MESH.experts)]


def adaptive() -> Iterator[dict[str, Any]]:
    """Per step: the imbalance, peaks and extra FLOPs of adaptive recomputation, of `full` and of none."""
    counters = {}
    plans = [("none", Recompute()), ("full", Recompute(Level.FULL)),
             ("adaptive", Recompute(Level.FULL, THRESHOLD, By.GROUP))]  # fmt: skip
    for name, plan in plans:
        torch.manual_seed(0)
        counters[name] = Counter([Steered()], plan, Method.HIERARCHICAL)
    for step, exponent in enumerate(EXPONENTS):
        batch = steered(exponent, step)
        counts = {name: counter.step(batch) for name, counter in counters.items()}
        none = counts["none"]
        rows = sorted(rows_of(batch))
        slope, base = np.polyfit(rows, sorted(none.held), 1)
        yield {
            "step": step,
            "exponent": exponent,
            "imbalance": max(rows),
            "cap": base + slope * THRESHOLD,
            **{f"peak_{name}": max(x.held) for name, x in counts.items()},
            **{f"extra_flops_{name}": x.flops / none.flops - 1 for name, x in counts.items() if name != "none"},
        }


def all_to_one() -> Tensor:
    """[tokens of all ranks, WIDTH] Tokens that all choose the experts of the first rank."""
    tokens = steered(0.0, 0)
    tokens[:, :EXPERTS] = torch.arange(EXPERTS, 0, -1.0)
    return tokens


def worst() -> Iterator[dict[str, Any]]:
    """Per plan: the most bytes that a rank keeps of a microbatch, the most that it recomputes, and their bounds."""
    sizes = ExpertSizes(EXPERTS, TOP, width=INNER, hidden=WIDTH)
    topology, layer = (
        exchange.Topology(MESH.experts // MESH.per_node, MESH.per_node),
        moe_layer(Plan(dtype="fp32"), sizes),
    )
    for method in (Method.FLAT, Method.HIERARCHICAL):
        for level, by in ((Level.FULL, By.GROUP), (Level.MEDIUM, By.GROUP), (Level.MEDIUM, By.RANK)):
            recompute = Recompute(level, THRESHOLD, by)
            most = worst_case_rows(Plan(sizes, topology, TOKENS, "fp32", method, recompute=(recompute,)))
            assert most is not None
            torch.manual_seed(0)
            counter = Counter([Steered()], recompute, method)
            for step in range(2):
                balanced = counter.step(steered(0.0, step))
            unbalanced = counter.step(all_to_one())
            yield {
                "method": method.value, "level": level.value, "by": by.value,
                "kept_balanced": max(balanced.held), "kept": max(unbalanced.held), "restored": max(unbalanced.restored),
                "kept_bound": TOKENS * layer.adaptive(THRESHOLD, most, level if by is By.RANK else None),
                "restored_bound": TOKENS * layer.whole(most),
            }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    by_level = [row for method in (Method.FLAT, Method.HIERARCHICAL) for row in levels(method)]
    steps, to_one = list(adaptive()), list(worst())
    result = {
        "levels": by_level,
        "adaptive": steps,
        "worst": to_one,
        "peak_over_cap": max(row["peak_adaptive"] / row["cap"] for row in steps),
        "extra_flops_first": steps[0]["extra_flops_adaptive"],
        "extra_flops_last": steps[-1]["extra_flops_adaptive"],
    }
    give(result, arguments)


if __name__ == "__main__":
    main()
