"""States that are copied beside the next step: the bits of copies at once, one state later, and none of a bad step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedc
from schedc_runtime import Checkpoints, Cut, Pipeline
from schedc_runtime.device.simulated import simulated_device
from schedc_runtime.errors import NonFiniteGradients, NonFiniteLoss, RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.testing import RankPool
from schedc_runtime.trainers.kept_states import kept_states
from support.kept_runs import Run
from support.simulated_cases import Normed, squares
from support.sweeps import halved, in_sweeps, swept

pytestmark = pytest.mark.slow


class Transposed(Normed):
    """A layer whose weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight = nn.Parameter(self.linear.weight.detach().t())


class SmallRun:
    """A run of blocks whose states are copied beside its steps."""

    def __init__(self, root: Path, schedule: str = "1f1b", ranks: int = 2, **given: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[Transposed() for _ in range(4)])
        program, self.rows = schedc.compile(schedule, P=ranks, M=4), torch.randn(8, 4)
        self.pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=self.rows, cut=Cut())
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), 0.05)
        self.saved = Checkpoints(root, self.pipe, self.optimizer, **{"copy": "beside", "durable": 100, **given})

    def step(self, rows: torch.Tensor | None = None, **options: Any) -> None:
        rows = self.rows if rows is None else rows
        self.saved.train(rows, self.rows, **options)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Model and moments."""
        slots = self.optimizer.state_dict()["state"]
        moments = {f"{n}.{key}": value.clone() for n, own in slots.items() for key, value in own.items()}
        return {**{name: value.clone() for name, value in self.pipe.state_dict().items()}, **moments}

    def kept(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        """The newest step in memory, and its parameters and buffers."""
        found = next(kept_states(self.pipe._assembly.guard.control, self.saved.places, self.saved.root))
        values = {}
        for name in self.pipe.state_dict():
            if (stored := found.state.tensors.get(f"model.{name}")) is not None:
                values[name] = torch.empty(stored.shape, dtype=stored.dtype)
                stored.read(values[name])
        return found.step, values


@contextmanager
def small_run(root: Path, **given: Any) -> Iterator[SmallRun]:
    run = SmallRun(root, **given)
    run.saved.resume()
    yield run
    if not run.saved._closed:
        run.saved.close()
    run.pipe.close()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "ranks", "order"),
    halved([("1f1b", 2, ""), ("dualpipe", 2, ""), ("zbv", 1, "watch"), ("zbv", 1, "late")]),
)
def test_an_image_has_the_state_before_its_step(tmp_path: Path, schedule: str, ranks: int, order: str) -> None:
    """On a simulated device copies run beside compute: in any order that its streams allow, and bits are the same.

    That is for one rank: several in a process have streams of their own, and write parts of one image.
    """
    where: dict[str, Any] = {"schedule": schedule, "ranks": ranks}

    def train() -> None:
        with small_run(tmp_path / "run", **where, copy=None if order else "beside") as run:
            for step in range(4):
                before = run.state()
                run.step()
                model = {name: before[name] for name in run.pipe.state_dict()}
                if order:  # the device may be late: the header is written when the next step begins
                    assert run.saved._beside is not None
                    assert not run.saved.is_held(step)
                    run.saved._beside.finish(wait=True)
                newest, values = run.kept()
                assert newest == step
                assert equal(values, model)
                assert not equal(values, {name: value.clone() for name, value in run.pipe.state_dict().items()})
            expected = run.state()
            run.saved.close()
            again = SmallRun(tmp_path / "run", **where)
            assert again.saved.resume() == 4
            assert equal(again.state(), expected)
            again.saved.close()

    if order:
        with simulated_device(order, lanes=["d2h"]):
            train()
    else:
        train()


def test_a_run_goes_on_behind_copies_beside_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout, rates and a loader, on another schedule: the bits of copies at once, which begin a state later."""
    ends, began = {}, {}
    for copy in ("now", "beside"):
        first = Run(tmp_path / copy, "1f1b", 2, copy=copy)
        first.train(4)
        again = Run(tmp_path / copy, "1f1b", 2, copy=copy)
        began[copy] = again.train(6)
        ends[copy] = again.state()
        again.saved.close()
    assert began == {"now": 3, "beside": 3}
    assert equal(ends["now"], ends["beside"])
    printed = [line for line in capsys.readouterr().out.splitlines() if "a step takes" in line]
    assert len(printed) == 2, "once a run, behind three steps"
    assert all(line.endswith("of it, since cpu has no streams") for line in printed)


def test_ranks_agree_on_a_state_a_step_later(tmp_path: Path) -> None:
    """The image of the newest agreed state is never written. What no image has room for is left out and counted."""
    with small_run(tmp_path / "run", every=2, durable=4) as run:
        saved = run.saved
        for step in range(3):
            run.step()
            assert saved._common == [None, 0, 0][step]
        first, second = saved._writer.images
        busy = first if saved._writer.step_of(0) == 0 else second
        busy.read_now = True  # the keeper reads state 0, and state 2 is not agreed on
        run.step()
        assert saved._common == 2
        run.step()
        assert saved.left_out == 1, "state 4 would go over state 0"
        assert {saved._writer.step_of(0), saved._writer.step_of(1)} == {0, 2}
        run.step()
        assert saved._common == 2, "this rank lacks state 4, and says so"
        busy.read_now = False
        run.step()
        assert run.kept()[0] == 6
        assert saved._common == 2
        run.step()
        assert saved._common == 6
        assert saved._on_disk == 6, "the state that was due at 4 and left out goes to disk as the next one"


def test_an_update_of_several_calls_copies_one_state(tmp_path: Path) -> None:
    """The state before the first call. Ranks agree on it when the next update begins."""
    with small_run(tmp_path / "run") as run:
        for step in range(3):
            before = run.state()
            for _ in range(2):
                run.saved.train(run.rows, run.rows, accumulate=2)
            run.update()
            newest, values = run.kept()
            assert (newest, run.saved._common) == (step, [None, 0, 1][step])
            assert equal(values, {name: before[name] for name in values})


@pytest.mark.parametrize("copy", ["beside", "now"])
@pytest.mark.parametrize("bad", [NonFiniteLoss, NonFiniteGradients])
def test_a_bad_step_replaces_no_image(tmp_path: Path, copy: str, bad: type[Exception]) -> None:
    with small_run(tmp_path / "run", copy=copy) as run:
        run.step()
        run.step()
        weight = next(run.pipe.parameters())
        before = weight.detach().clone()
        hook = weight.register_hook(lambda gradient: gradient * (float("nan") if bad is NonFiniteGradients else 1.0))
        with pytest.raises(bad):
            run.step(rows=run.rows * (float("inf") if bad is NonFiniteLoss else 1.0))
        hook.remove()
        assert torch.equal(weight, before), "no update was made"
        assert run.kept()[0] == 1
        assert run.saved._common == 1, "ranks had agreed on it at the start of the step"
        run.optimizer.zero_grad()
        run.step()  # another batch, from the same state
        assert run.kept()[0] == 2


def test_a_step_that_raises_leaves_the_whole_state_before_it(tmp_path: Path) -> None:
    with small_run(tmp_path / "run") as run:
        run.step()
        run.step()
        before = {name: value.clone() for name, value in run.pipe.state_dict().items()}
        block = next(each for each in run.pipe.modules[1].modules() if isinstance(each, Transposed))
        block.fails = True
        with pytest.raises(InstructionError, match="no forward"):
            run.step()
        newest, values = run.kept()
        assert newest == 2
        assert equal(values, before)
        block.fails = False


def test_words_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match=r"Checkpoints\(copy='later'\)\n.*'beside' or 'now'"):
        SmallRun(tmp_path / "run", copy="later")
    with pytest.raises(RuntimeFault, match=r"copy='beside' and audit"):
        SmallRun(tmp_path / "run", audit=object())
    with small_run(tmp_path / "run") as run:
        with pytest.raises(RuntimeFault, match=r"train\(snapshot=...\) beside .*\n.*copy='now'"):
            run.step(snapshot=True)
        run.step(outputs=True)


@in_sweeps(
    "test_a_run_goes_on_behind_copies_beside_its_steps",
    "runtime/keeper/test_checkpoints.py::test_killed_ranks_lose_nothing",
)
@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_dies_while_a_state_is_copied_takes_the_run_back_by_one(tmp_path: Path) -> None:
    workers, case = RankPool(2), "support.kept_runs:kept_run"
    where: dict[str, Any] = {"schedule": "zbv", "steps": 6, "copy": "beside"}
    try:
        whole = workers.run(case, root=str(tmp_path / "whole"), **where)[0][1]
        for point, begins in (("flip", [2]), ("update", [2, 3]), ("START", [2]))[: swept(3, 1)]:
            root = str(tmp_path / point)
            outcomes = workers.outcomes(case, root=root, kills=[[1, point, 3, 5]], **where)
            assert getattr(outcomes[1], "kind", "") == "died"
            first, digest, _ = workers.run(case, root=root, **where)[0]
            assert first in begins, point
            assert digest == whole, point
    finally:
        workers.close()
