"""Train a small GPT that goes on after the death of a rank, with the bits of an undisturbed run.

torchrun --nproc-per-node 4 --max-restarts 3 examples/06_survive.py --root runs/survive
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor

import schedc
from schedc_runtime import Checkpoints, Pipeline, join
from schedc_runtime.models.gpt import GPT, GPTConfig, counting_sequences, next_token_loss


class Batches:
    """Batches by number. A loader says its position, so that a run goes on with the batch that comes next."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens, self.position = rows, tokens, 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.position += 1
        return counting_sequences(self.rows, self.tokens, seed=self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    options = parser().parse_args()
    join()
    program = schedc.compile("dualpipev", P=int(os.environ.get("WORLD_SIZE", "1")), M=8)
    torch.manual_seed(0)
    pipe = Pipeline(GPT(GPTConfig(width=32, blocks=8, context=16, dropout=0.1)), program, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    batches = Batches(16, 16)

    kept = {"memory": options.memory, "replicas": options.replicas}
    saved = Checkpoints(options.root, pipe, optimizer, data=batches, rates=rates, every=1, durable=5, **kept)
    for step in range(saved.resume(), options.steps):
        loss = saved.train(*next(batches))
        if [pipe.rank, step] == options.kill and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    saved.close()

    state = pipe.full_state_dict()
    if pipe.rank == 0:
        bits = b"".join(value.numpy().tobytes() for value in state.values())
        print(f"sha256 of the model: {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--root", default="runs/survive", help="folder of the run")
    result.add_argument("--steps", type=int, default=8)
    result.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"), help="this rank kills itself once")
    result.add_argument("--memory", help="folder of the images; an agent with one of its own is a node of its own")
    result.add_argument("--replicas", type=int, default=0, help="1: copy each state to another node")
    return result


if __name__ == "__main__":
    main()
