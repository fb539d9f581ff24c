"""Runs what the documents show of the runtime: the lines for a trainer, and the example trainer under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from schedc_runtime.testing import pool
from support.paths import ROOT
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved, in_sweeps
from support.warm_command import run_torchrun

BATCHES = [tokens(32, seed=seed) for seed in (1, 2, 3)]


def embed(rank: int, world_size: int, code: str) -> list[Any]:
    """Runs ``code`` with the names that a trainer defines; returns the rank and the last loss."""
    model = small_gpt(8, tied=True)
    names: dict[str, Any] = {"torch": torch, "model": model, "loss_fn": next_token_loss, "loader": BATCHES}
    names["batch"], names["targets"] = BATCHES[0]
    exec(code, names)
    pipe, loss = names["pipe"], names["loss"]
    if "graph" in names:
        assert "stage 7 on rank 0: " in names["graph"].source
    pipe.close()
    return [pipe.rank, loss.item()]


def train_plainly(steps: int) -> float:
    """The last loss of as many steps of one process, by autograd alone."""
    model = small_gpt(8, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch, targets in BATCHES[:steps]:
        optimizer.zero_grad()
        loss = next_token_loss(model(batch), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("document", "steps"), halved([("README.md", 3), ("docs/guide/running.md", 1)]))
def test_the_lines_for_a_trainer(document: str, steps: int) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    code = first + "".join(block for block in others if "partition.graph" in block)
    answers = pool(4).run("runtime.pipeline.test_embedding:embed", code=code)
    assert [rank for rank, _ in answers] == [0, 1, 2, 3]
    assert {loss for _, loss in answers} == {answers[0][1]}
    assert answers[0][1] == pytest.approx(train_plainly(steps), rel=1e-9)


EXAMPLE = "examples/02_train_gpt.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@in_sweeps("test_the_example_under_torchrun_which_restarts_it_once")
@pytest.mark.processes
def test_torchs_own_command_starts_the_example() -> None:
    """With a new interpreter, on one rank; other tests fork the ranks of torchrun."""
    sizes = ["--microbatches", "2", "--blocks", "1", "--width", "8", "--tokens", "4", "--steps", "1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, EXAMPLE, "--schedule", "1f1b", *sizes]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(step \d+|evaluation)", done.stdout, re.MULTILINE) == ["step 1", "evaluation"]


@pytest.mark.processes
def test_the_example_under_torchrun_which_restarts_it_once(tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    sizes = {"microbatches": 4, "blocks": 4, "width": 16, "tokens": 8, "steps": 20, "learning-rate": 0.02}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    command = ["--nproc-per-node", "2", "--max-restarts", "1", "tests/runtime/ranks/restarting.py", "4"]
    command += [EXAMPLE, "--schedule", "dualpipev", *options, "--save", str(saved)]
    done = run_torchrun(command, ROOT, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError: injected" in done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[0] == losses[1], "step 1 of both attempts"
    assert re.findall(r"^(step \d+|evaluation)", done.stdout, re.MULTILINE) == [
        "step 1",
        "step 1",
        "step 10",
        "step 20",
        "evaluation",
    ]
    assert losses[-1] < losses[0]
    state = torch.load(saved, weights_only=True)
    assert {"token_embedding.weight", "blocks.3.mlp.down.bias", "head.weight"} <= state.keys()
