"""After a fault is proved a run goes on before it, with the bits of a run that had none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from schedc_runtime import Audit, WrongBits
from schedc_runtime.saved.read import committed_steps
from schedc_runtime.trainers.unproved import MARK, proved_state
from support.audit_cases import FaultyStage, Flip, watch_of
from support.kept_runs import Run, bits

STEPS = 8


def _wait_for_the_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step of a run begin when the state before it is on disk."""
    step = run.pipe.step

    def late(*batch: Any, **options: Any) -> Any:
        deadline = time.monotonic() + 30.0
        while run.saved.step and run.saved.step not in committed_steps(run.saved.root):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return step(*batch, **options)

    monkeypatch.setattr(run.pipe, "step", late)


@pytest.mark.slow
def test_a_run_goes_on_before_the_last_proved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "undisturbed", "1f1b", 2)
    run.train(STEPS)
    expected = bits(run.state())
    run.saved.close()
    run = Run(tmp_path / "run", "1f1b", 2, every=1, durable=1, keep=8, audit=Audit(folder=tmp_path / "audit"))
    _wait_for_the_disk(run, monkeypatch)
    case = watch_of(run.pipe).table.case(6)
    assert case is not None
    stage = run.pipe._assembly.stages[case.suspect][case.stage]
    run.train(6)
    flip = Flip("weights", 4, 5, 61, True)
    with FaultyStage(stage, case.microbatch, flip), pytest.raises(WrongBits) as caught:
        run.saved.train(*next(run.batches))
    assert caught.value.proved == 5
    assert (tmp_path / "run" / MARK).read_text() == "5\n"
    run.optimizer.zero_grad()
    with pytest.raises(Exception, match="before resume"):
        run.saved.train(*next(run.batches))
    assert run.train(STEPS) <= 5
    told = capsys.readouterr().out
    assert "left out: states behind step 5: a device that computes wrongly may have spoilt them" in told
    assert not (tmp_path / "run" / MARK).exists()
    assert bits(run.state()) == expected
    run.saved.close()
    assert committed_steps(tmp_path / "run") == [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("step", "calls", "proved", "accumulate", "expected"),
    [(6, 6, 5, 1, 5), (6, 6, 6, 1, 6), (6, 6, 0, 1, 0), (6, 12, 11, 2, 5), (6, 12, 10, 2, 5), (6, 12, 9, 2, 4),
     (6, 12, 13, 2, 6)],
)  # fmt: skip
def test_the_state_before_a_proved_step(step: int, calls: int, proved: int, accumulate: int, expected: int) -> None:
    assert proved_state(step, calls, proved, accumulate) == expected


@pytest.mark.slow
def test_copies_are_compared_at_every_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "dualpipe", 2, every=2, durable=2, audit=Audit(folder=tmp_path / "audit", every=1000))
    run.train(2)
    with torch.no_grad():
        next(run.pipe.parameters())[0] += 1
    with pytest.raises(Exception, match="has other values on"):
        run.saved.train(*next(run.batches))
