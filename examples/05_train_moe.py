"""Train a small transformer in the shape of DeepSeek-V3, pipelined, its experts spread over ranks.

torchrun --nproc-per-node 4 examples/05_train_moe.py --experts-over 2 --schedule dualpipev --overlap

Groups of ``--experts-over`` neighbouring processes share the experts of their layers, each with a batch of its own.
``--ranks`` of these groups form a pipeline, by default all of them. Further groups form replicas of the pipeline.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch
import torch.distributed as dist

import schedc
from schedc.plan import Capacity, Drop, Method, Plan
from schedc_runtime import Pipeline, join
from schedc_runtime.models.gpt import counting_sequences
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, multi_token_loss
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.ranks.mesh import Mesh


def main() -> None:
    options = parser().parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    join("gloo")
    ranks = options.ranks or processes // options.experts_over
    mesh = Mesh.of_environment(ranks, options.experts_over)
    if options.per_node:
        mesh = replace(mesh, per_node=options.per_node)
    program = schedc.compile(options.schedule, P=ranks, M=options.microbatches)
    plan = Plan(
        method=Method(options.method),
        overlap=options.overlap,
        capacity=Capacity(options.capacity, Drop(options.drop)) if options.capacity else None,
    )

    torch.manual_seed(0)  # the same model on every rank
    model = MoETransformer(config(options))
    pipe = Pipeline(model, program, loss_fn=multi_token_loss(), mesh=mesh, plan=plan)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.learning_rate)

    process = dist.get_rank() if dist.is_initialized() else 0
    replica = mesh.coordinate(process).replica
    rows = options.rows * options.microbatches
    for step in range(1, options.steps + 1):
        batch, targets = counting_sequences(rows, options.tokens, seed=step * mesh.replicas + replica)
        optimizer.zero_grad()
        loss = pipe.step(batch, targets)
        optimizer.step()
        if process == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}, {routed(model)}", flush=True)
        pipe.update_biases()
    if options.save:
        state = pipe.full_state_dict()
        if process == 0:
            torch.save(state, options.save)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def routed(model: MoETransformer) -> str:
    """The imbalance of the experts in the layers of this process, and the share of dropped choices, in words."""
    counted = [layer.statistics for _, layer in moe_layers(model) if layer.statistics.choices]
    if not counted:
        return "no expert layer here"
    dropped = sum(each.dropped for each in counted) / sum(each.choices for each in counted)
    return f"imbalance {max(each.imbalance for each in counted):.2f}, dropped {dropped:.1%}"


def config(options: argparse.Namespace) -> MoEConfig:
    routing = RouterConfig(
        options.experts, options.top, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True, bias_rate=0.01,
        balance=1e-3,
    )  # fmt: skip
    return MoEConfig(moe_blocks=options.blocks - 1, routing=routing, multi_token=True)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--schedule", default="dualpipev", help="a name of `schedc list`, or the path of a .sched file")
    result.add_argument("--ranks", type=int, help="ranks of the pipeline; by default all processes over --experts-over")
    result.add_argument("--experts-over", type=int, default=1, help="ranks that share the experts of a layer")
    result.add_argument("--method", choices=list(Method), default="flat", help="how rows travel to their experts")
    result.add_argument(
        "--per-node", type=int, help="ranks of an expert group in one node; by default those of torchrun"
    )
    result.add_argument("--overlap", action="store_true", help="run pairs in the order of cell programs")
    result.add_argument("--capacity", type=float, help="drop and pad: room over the mean number of tokens per expert")
    result.add_argument("--drop", choices=list(Drop), default="probs", help="which tokens stay")
    result.add_argument("--microbatches", type=int, default=4)
    result.add_argument("--rows", type=int, default=2, help="rows of a microbatch on a replica")
    result.add_argument("--tokens", type=int, default=32)
    result.add_argument("--blocks", type=int, default=4, help="one dense block and then MoE blocks")
    result.add_argument("--experts", type=int, default=32)
    result.add_argument("--top", type=int, default=8, help="experts of a token")
    result.add_argument("--steps", type=int, default=30)
    result.add_argument("--learning-rate", type=float, default=3e-3)
    result.add_argument("--save", metavar="FILE", help="write the whole model's state dict")
    return result


if __name__ == "__main__":
    main()
