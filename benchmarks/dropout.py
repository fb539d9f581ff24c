"""Trains one model with dropout in many ways, and compares the losses of a step bit by bit.

    python benchmarks/dropout.py [--json] [--nodes N] [--per-node N] [--experts E] [--top K] [--blocks N]
                                 [--levels none,light,full]

The model is a transformer with experts and dropout. The ranks of an expert group are replicas, all in this process. The
cases are all combinations of

    schedule     1f1b and dualpipev, on P = 1 and 2 ranks
    method       of the exchange of rows: flat, hierarchical, allgather
    overlap      off, auto
    recompute    none, full; `--levels` takes others
    hot          off, and idle: experts may be lent, and the imbalance never is large enough

The serial twin runs the whole model without a pipeline, microbatch by microbatch, under `named_random`. An expert
multiplies the rows of all replicas in one product, in the twin as in the pipeline: bits may depend on the number of
rows. So the twin runs each forward up to the first experts without results, joins the rows of all replicas there, and
begins anew. It adds an expert's rows by rank and node, as the group does.

Instrument: a step in float64 on one thread. A loss is the mean over the microbatches of all replicas. Bits of the
losses of single microbatches are compared, too.

Printed: `losses` is the number of different losses over all cases and the twin, and `values` are these in hexadecimal.
`microbatches` is the number of different lists of losses of microbatches. `runs` is the number of cases. `other_seeds`
is the number of different losses over three other seeds of the same case: different losses show that masks count.
`cases` has each case with its loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc.ir.program import Program
from schedc_runtime import Pipeline, named_random
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import RouterConfig

VOCABULARY, LENGTH, MICROBATCHES, SEED = 32, 6, 4, 3
CHOICES = {
    "schedule": ("1f1b", "dualpipev"),
    "P": (1, 2),
    "method": ("flat", "hierarchical", "allgather"),
    "overlap": ("off", "auto"),
    "recompute": ("none", "full"),
    "hot": ("off", "idle"),
}
IDLE = "hot 2 until imbalance < 1000"


def model_of(args: argparse.Namespace) -> MoETransformer:
    torch.manual_seed(0)
    config = MoEConfig(
        vocab=VOCABULARY, width=24, heads=2, dense_blocks=1, moe_blocks=args.blocks - 1, inner=32, expert_inner=12,
        query_rank=8, key_value_rank=8, plain=4, rotary=4, value=8, dropout=0.15,
        routing=RouterConfig(args.experts, args.top),
    )  # fmt: skip
    return MoETransformer(config).double()


def planned(case: dict[str, Any], args: argparse.Namespace) -> Program:
    """The program of a case, with its plan."""
    lines = [
        f"layers {args.blocks} dense 1", f"experts {args.experts} top {args.top}",
        f"topology nodes {args.nodes} x {args.per_node}", f"alltoall {case['method']}", f"overlap {case['overlap']}",
    ]  # fmt: skip
    lines += [f"recompute {case['recompute']}"] if case["recompute"] != "none" else []
    lines += [IDLE] if case["hot"] == "idle" else []
    head = f"plan tried = {case['schedule']}(P = {case['P']}, M = {MICROBATCHES})"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tried.sched"
        path.write_text("\n".join(["sched 1", "", head + " {", *(f"  {line}" for line in lines), "}", ""]))
        return schedc.compile(f"{path}:tried")


def batch_of(replicas: int) -> tuple[Tensor, Tensor]:
    """[replicas * MICROBATCHES, LENGTH] tokens and targets, those of replica 0 first."""
    shape = (2, replicas * MICROBATCHES, LENGTH)
    tokens, targets = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return tokens, targets


Losses = tuple[str, tuple[str, ...]]
"""The loss of a step, and those of its microbatches, in hexadecimal."""


def piped(case: dict[str, Any], args: argparse.Namespace, seed: int = SEED) -> Losses:
    """The losses of one step of a pipeline whose ranks are all here."""
    pipe = Pipeline(model_of(args), planned(case, args), loss_fn=next_token_loss, in_process=True, seed=seed)
    result: Any = pipe.step(*batch_of(args.nodes * args.per_node), outputs=True)
    lent = sum(layer.statistics.hot_experts for module in pipe.modules for _, layer in moe_layers(module))
    pipe.close()
    if lent:
        raise RuntimeError(f"{case}: {lent} experts were lent, and none should be")
    return in_bits(result.loss, result.losses)


class _Halt(Exception):
    """A forward has come to experts whose results are not there yet."""


class Together(nn.Module):
    """A layer whose experts multiply the rows of all replicas, and whose sums are those of ranks in ``nodes``.

    rows, gates: [replicas][experts] what forwards brought. results: [replicas][experts] rows for the forwards after.
    """

    def __init__(self, layer: MoELayer, nodes: int, per_node: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, (nodes, per_node, layer.router.routing.experts // (nodes * per_node))
        self.brought: list[tuple[list[Tensor], list[Tensor]]] = []
        self.results: list[list[Tensor]] = []
        self.replica = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        index, weight, _ = self.layer.router(tokens)
        chosen = [index == expert for expert in range(self.layer.router.routing.experts)]
        takers = [each.any(-1).nonzero().flatten() for each in chosen]
        if not self.results:
            self.brought.append(([tokens[each] for each in takers], [weight[each] for each in chosen]))
            raise _Halt
        output = self._added(tokens, takers, self.results[self.replica])
        if self.layer.shared is not None:
            output = output + self.layer.shared(tokens)
        return output.view_as(x)

    def _added(self, tokens: Tensor, takers: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """[tokens, width] by expert on a rank, by rank in a node, then by node, always upwards and from zero."""
        nodes, per_node, local = self.shape
        output = torch.zeros_like(tokens)
        for node in range(nodes):
            of_node = torch.zeros_like(tokens)
            for rank in range(node * per_node, (node + 1) * per_node):
                of_rank = torch.zeros_like(tokens)
                for expert in range(rank * local, (rank + 1) * local):
                    of_rank[takers[expert]] += rows[expert]
                of_node += of_rank
            output += of_node
        return output

    def multiply(self) -> None:
        """Makes the results of all replicas. The rows of an expert are those of replica 0, of replica 1, ..."""
        rows, gates = (
            [torch.cat(parts) for parts in zip(*each, strict=True)] for each in zip(*self.brought, strict=True)
        )
        results = self.layer.experts(torch.cat(rows), list(map(len, rows)), torch.cat(gates))
        shares = [
            each.split([len(part) for part in parts])
            for each, parts in zip(
                results.split(list(map(len, rows))), zip(*(each for each, _ in self.brought), strict=True), strict=True
            )
        ]
        self.results = [list(each) for each in zip(*shares, strict=True)]
        self.brought.clear()


@torch.no_grad()
def serial(args: argparse.Namespace) -> Losses:
    """The same losses without a pipeline."""
    model, replicas = model_of(args), args.nodes * args.per_node
    layers = []
    for block in model.blocks:
        if isinstance(block.mlp, MoELayer):
            block.mlp = Together(block.mlp, args.nodes, args.per_node)
            layers.append(block.mlp)
    parts = torch.stack([_microbatch(model, layers, number, replicas) for number in range(MICROBATCHES)], 1).flatten()
    return in_bits(parts.mean(), parts)


def _microbatch(model: nn.Module, layers: Sequence[Together], number: int, replicas: int) -> Tensor:
    """[replicas] losses of each replica's microbatch of this number."""
    tokens, targets = (part.unflatten(0, (replicas, MICROBATCHES))[:, number] for part in batch_of(replicas))
    for each in layers:
        each.results = []
    for layer in (*layers, None):
        losses = []
        for replica in range(replicas):
            for each in layers:
                each.replica = replica
            with named_random(model, seed=SEED, microbatch=replica * MICROBATCHES + number), suppress(_Halt):
                losses.append(next_token_loss(model(tokens[replica, None]), targets[replica, None]))
        if layer is not None:
            layer.multiply()
    return torch.stack(losses)


def in_bits(loss: Tensor, losses: Tensor) -> Losses:
    return float(loss).hex(), tuple(map(float.hex, losses.tolist()))


def cases(levels: Sequence[str]) -> Iterator[dict[str, Any]]:
    choices = CHOICES | {"recompute": levels}
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    every = list(cases(args.levels))
    results = [serial(args), *(piped(case, args) for case in every)]
    whole, parts = {loss for loss, _ in results}, {losses for _, losses in results}
    return {
        "losses": len(whole),
        "values": sorted(whole),
        "microbatches": len(parts),
        "runs": len(every),
        "other_seeds": len({piped(every[0], args, SEED + other)[0] for other in (1, 2, 3)} - whole),
        "cases": [{"case": "serial", "loss": results[0][0]}]
        + [case | {"loss": loss} for case, (loss, _) in zip(every, results[1:], strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4, help="at least 4, one for each stage")
    parser.add_argument("--levels", type=lambda text: text.split(","), default=CHOICES["recompute"])
    args = parser.parse_args()
    if args.blocks < 4:
        parser.error("dualpipev on two ranks has 4 stages: take at least 4 blocks")
    if args.experts % (args.nodes * args.per_node):
        parser.error(f"{args.experts} experts on {args.nodes * args.per_node} ranks: take a number that divides")
    torch.set_num_threads(1)
    results = measure(args)
    print(
        json.dumps(results) if args.json else json.dumps({k: v for k, v in results.items() if k != "cases"}, indent=2)
    )


if __name__ == "__main__":
    main()
