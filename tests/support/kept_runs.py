"""Runs that keep their states: what is trained, on which ranks, and where a rank kills itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import schedc
from schedc_runtime import Checkpoints, Pipeline, watch_speed
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.keeper import images
from schedc_runtime.keeper.start import KeeperMeeting
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.trainers import image_writer
from support.runtime_cases import VOCAB, next_token_loss, small_gpt, tokens


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
    """A small run of a GPT, or of a ``model``, with dropout, AdamW and a schedule of learning rates."""

    def __init__(self, root: Path, schedule: str, ranks: int, *, in_process: bool = True, **given: Any) -> None:
        model = given.pop("model", {})
        if not isinstance(model, nn.Module):
            model = small_gpt(8, dropout=0.1, **model)
        program = schedc.compile(schedule, P=ranks, M=4)
        self.pipe = Pipeline(
            model, program, loss_fn=next_token_loss, in_process=in_process, timeout=given.pop("timeout", 60.0)
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), 1e-2)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.batches = Batches()
        self.saved = Checkpoints(root, self.pipe, self.optimizer, data=self.batches, rates=self.rates, **given)

    def train(self, steps: int, before_steps: Callable[[], object] = lambda: None) -> int:
        """Go on until ``steps`` updates have been made; returns where it began."""
        first = self.saved.resume()
        before_steps()
        for _ in range(first, steps):
            self.saved.train(*next(self.batches))
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        return first

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model, the rates and the position, on rank 0."""
        facts = torch.tensor([self.rates.get_last_lr()[0], self.batches.position, self.pipe.steps], dtype=torch.double)
        return {**self.pipe.full_state_dict(), "facts": facts}


def layers(width: int = 8) -> nn.Module:
    """Eight layers with dropout, which are recorded in a third of the time of a GPT."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(nn.Embedding(VOCAB, width), *blocks, nn.Linear(width, VOCAB)).double()


def bits(state: dict[str, torch.Tensor]) -> str:
    """A digest of a state."""
    import hashlib

    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()


def kept_run(
    rank: int,
    world_size: int,
    root: str,
    schedule: str,
    steps: int,
    kills: Sequence[Sequence[Any]] = (),
    agent: bool = False,
    watched: bool = False,
    light: bool = False,
    printed: str = "",
    **given: Any,
) -> list[Any]:
    """A run on all ranks. agent: as under an agent that restarts. watched: keep the last steps, too.

    light: of `layers`. printed: a file for what ranks and keeper say on stderr. given: to `Checkpoints`.

    kills: each [rank, point, steps behind the first one, seed]. The step that it began at is added to a file beside the
    folder. Returns this step, the digest of its end on rank 0, and the pid of the keeper.
    """
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    if agent:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    if printed:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    mine = [kill[1:] for kill in kills if kill[0] == rank]
    if any(point == "meeting" for point, *_ in mine):
        _before(KeeperMeeting, "start", _die)
    if light:
        given["model"] = layers()
    run = Run(Path(root), schedule, world_size, in_process=False, durable=3, **given)
    watch = run.saved.places.watch()
    assert watch is not None
    if watched:
        watch_speed(run.pipe, level=1, folder=run.saved.places.folder)
    try:
        first = run.train(steps, before_steps=partial(_began, root, rank, mine, run))
        digest = bits(run.state())
        run.saved.close()
        return [first, digest, watch.process.pid]
    finally:
        with suppress(RuntimeFault):
            run.pipe.close()


def _began(root: str, rank: int, kills: Sequence[Sequence[Any]], run: Run) -> None:
    """Note where a run begins, and lay the traps of this rank."""
    if rank == 0:
        with Path(f"{root}.began").open("a") as file:
            print(run.saved.step, file=file)
    for point, behind, seed in kills:
        _lay(run, point, run.saved.step + behind, seed)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    whole = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        act(*arguments)
        return whole(*arguments, **keywords)

    setattr(owner, name, call)


def _behind(owner: Any, name: str, act: Callable[..., object]) -> None:
    whole = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = whole(*arguments, **keywords)
        act(*arguments)
        return result

    setattr(owner, name, call)


POINTS: Mapping[str, tuple[Callable[[Any, str, Callable[..., object]], None], Any, str]] = {
    "clear": (_before, images.Image, "clear"),
    "copy": (_before, image_writer.torch, "_foreach_copy_"),
    "flip": (_before, images.Image, "finish"),
    "copied": (_behind, images.Image, "finish"),
    "agree": (_before, ControlPlane, "fold"),
    "update": (_before, sys.modules["torch.optim.adam"], "adam"),
    "updated": (_behind, sys.modules["torch.optim.adam"], "adam"),
}
"""Places in a step where a rank can be killed: before or behind a method. Further points are instruction kinds."""


def _lay(run: Run, point: str, at: int, seed: int) -> None:
    """Let this process be killed at a point from step ``at`` on: a key of `POINTS`, or one instruction of a kind."""

    def in_step(*_: Any) -> None:
        if run.saved.step >= at:
            _die()

    def in_stream(executor: Executor, *_: Any) -> None:
        rows = [number for number, step in enumerate(executor.code.steps) if step.instruction.kind.name == point]
        if run.saved.step >= at and rows:
            executor.code.calls[Random(seed).choice(rows)], executor.altered = (_die, None), True

    if point in POINTS:
        way, owner, name = POINTS[point]
        way(owner, name, in_step)
    elif point != "meeting":
        _before(Executor, "start", in_stream)
