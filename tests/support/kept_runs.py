"""Runs that keep their states: what is trained, on which ranks, and where a rank kills itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import schedc
from schedc_runtime import Checkpoints, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper import images
from schedc_runtime.stage.stage import Stage
from schedc_runtime.trainers import image_writer
from support.runtime_cases import next_token_loss, small_gpt, tokens


class Batches:
    """A loader that can go on from a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return tokens(8, seed=self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Run:
    """A small run of a GPT with dropout, AdamW and a schedule of learning rates."""

    def __init__(self, root: Path, schedule: str, ranks: int, *, in_process: bool = True, **given: Any) -> None:
        model = small_gpt(8, dropout=0.1, **given.pop("model", {}))
        program = schedc.compile(schedule, P=ranks, M=4)
        self.pipe = Pipeline(
            model, program, loss_fn=next_token_loss, in_process=in_process, timeout=given.pop("timeout", 60.0)
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), 1e-2)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.batches = Batches()
        self.saved = Checkpoints(root, self.pipe, self.optimizer, data=self.batches, rates=self.rates, **given)

    def train(self, steps: int, before_update: Callable[[int], object] = lambda step: None) -> int:
        """Go on until ``steps`` updates have been made; returns where it began."""
        first = self.saved.resume()
        for step in range(first, steps):
            self.saved.train(*next(self.batches))
            before_update(step)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        return first

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model, the rates and the position, on rank 0."""
        facts = torch.tensor([self.rates.get_last_lr()[0], self.batches.position, self.pipe.steps], dtype=torch.double)
        return {**self.pipe.full_state_dict(), "facts": facts}


def bits(state: dict[str, torch.Tensor]) -> str:
    """A digest of a state."""
    import hashlib

    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()


def kept_run(
    rank: int, world_size: int, root: str, schedule: str, steps: int, kill: list[Any] | None = None, agent: bool = False
) -> list[Any]:
    """A run on all ranks. kill: [rank, point, step] where a rank kills itself. agent: as under an agent that restarts.

    Returns where it began, the digest of its end on rank 0, and the pid of the keeper.
    """
    if agent:
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    run = Run(Path(root), schedule, world_size, in_process=False, durable=4)
    watch = run.saved.places.watch()
    assert watch is not None
    before = (lambda step: None) if kill is None or kill[0] != rank else _killing(run, *kill[1:])
    try:
        first = run.train(steps, before)
        digest = bits(run.state())
        run.saved.close()
        return [first, digest, watch.process.pid]
    finally:
        with suppress(RuntimeFault):
            run.pipe.close()


def _killing(run: Run, point: str, at: int) -> Callable[[int], object]:
    """Lets this process be killed at a point of update ``at``; returns what is called before each update."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def patched(owner: Any, name: str, when: Callable[[], bool], behind: bool = False) -> None:
        whole = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if when() and not behind:
                die()
            result = whole(*arguments, **keywords)
            if when() and behind:
                die()
            return result

        setattr(owner, name, call)

    def in_step() -> bool:
        return run.saved.step == at

    if point in ("forward", "backward", "weight"):
        patched(Stage, point, in_step)
    elif point == "copy":
        patched(image_writer.torch, "_foreach_copy_", in_step)
    elif point == "flip":
        patched(images.Image, "finish", in_step)
    elif point == "copied":
        patched(images.Image, "finish", in_step, behind=True)
    elif point == "update":
        return lambda step: die() if step == at else None
    elif point == "updated":
        run.optimizer.register_step_post_hook(lambda *_: die() if in_step() or run.saved.step == at + 1 else None)
    return lambda step: None
