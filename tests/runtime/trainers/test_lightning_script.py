"""The script for Lightning on the page about trainers: it saves, goes on, and trains as a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from project.console import File, session
from support.needs import needs
from support.paths import ROOT
from support.sweeps import in_sweeps
from support.warm_command import run_torchrun

PAGE = ROOT / "docs" / "guide" / "coming-from.md"
SAVED = """
state = pipe.full_state_dict()
if trainer.is_global_zero:
    torch.save(state, "state.pt")
"""


@in_sweeps("runtime/trainers/test_trainers.py::test_lightning_trains_as_a_plain_loop")
@pytest.mark.processes
@pytest.mark.slow
@needs("pytorch_lightning")
def test_a_run_that_goes_on_is_a_plain_loop(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (script,) = (part.text for part in session(page) if isinstance(part, File) and part.name == "lit.py")
    (tmp_path / "lit.py").write_text(script + SAVED, encoding="utf-8")
    for words, step in (([], 8), (["again"], 16)):
        run = run_torchrun(["--nproc-per-node", "2", "lit.py", *words], tmp_path)
        assert run.returncode == 0, run.stderr
        assert f"step {step}\n" in run.stdout
    trained = torch.load(tmp_path / "state.pt")
    for name, value in _trained_plainly(script).items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def _trained_plainly(script: str) -> dict[str, Any]:
    """The model of the script's first half, after 16 steps without a pipeline."""
    before = script.partition("pipe = ")[0].replace("device = join()", 'device = torch.device("cpu")')
    names: dict[str, Any] = {}
    exec(compile(before, "plain.py", "exec"), names)
    model = names["model"]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        for batch, targets in names["data"]:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    state: dict[str, Any] = model.state_dict()
    return state
