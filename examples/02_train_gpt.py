"""Train a small GPT with any schedule of the library, one process per rank.

torchrun --nproc-per-node 4 examples/02_train_gpt.py --schedule dualpipev --microbatches 16
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import schedc
from schedc_runtime import Pipeline, join
from schedc_runtime.models.gpt import GPT, GPTConfig, counting_sequences, next_token_loss


def main() -> None:
    options = parser().parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = join()  # joins the other ranks: over NCCL with a GPU each, or over gloo
    sizes = {"v": options.chunks} if options.chunks else {}
    program = schedc.compile(options.schedule, P=ranks, M=options.microbatches, **sizes)

    torch.manual_seed(0)  # the same model on every rank
    model = GPT(GPTConfig(width=options.width, blocks=options.blocks, context=options.tokens)).to(device)
    pipe = Pipeline(model, program, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.learning_rate)

    for step in range(1, options.steps + 1):
        batch, targets = counting_sequences(options.rows * options.microbatches, options.tokens, seed=step)
        optimizer.zero_grad()
        loss = pipe.step(batch, targets)
        optimizer.step()
        if pipe.rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    loss = pipe.evaluate(*counting_sequences(options.rows * options.microbatches, options.tokens, seed=0))
    if pipe.rank == 0:
        print(f"evaluation: loss {loss.item():.4f}")
    if options.save:
        state = pipe.full_state_dict()
        if pipe.rank == 0:
            torch.save(state, options.save)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--schedule", default="dualpipev", help="a name of `schedc list`, or the path of a .sched file")
    result.add_argument("--microbatches", type=int, default=8)
    result.add_argument("--chunks", type=int, help="size v of the interleaved schedules")
    result.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    result.add_argument("--tokens", type=int, default=32)
    result.add_argument("--width", type=int, default=64)
    result.add_argument("--blocks", type=int, default=8)
    result.add_argument("--steps", type=int, default=30)
    result.add_argument("--learning-rate", type=float, default=3e-3)
    result.add_argument("--save", metavar="FILE", help="write the whole model's state dict")
    return result


if __name__ == "__main__":
    main()
