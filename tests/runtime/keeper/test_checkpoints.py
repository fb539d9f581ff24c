"""Runs go on with the bits of an undisturbed run: from memory, from disk, and on other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedc_runtime.keeper import flush
from schedc_runtime.keeper.images import TENSORS
from schedc_runtime.keeper.places import Places
from schedc_runtime.keeper.watch import Keeper
from schedc_runtime.ranks.processes import process_here
from schedc_runtime.saved.read import committed_steps
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.image_writer import ImageWriter, state_size
from support.kept_runs import Run
from support.killed_runs import Case, held, killed_flushes, killed_trainings
from support.sweeps import swept, thinned

STEPS = 6


@pytest.fixture(scope="module", params=swept([False, True], [True]), ids=lambda tied: "tied" if tied else "untied")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, dict[str, Any]]:
    """Whether weights are tied, and the state of a run that nothing stops."""
    whole = Run(tmp_path_factory.mktemp("undisturbed") / "whole", "1f1b", 2, model={"tied": request.param})
    whole.train(STEPS)
    state = whole.state()
    whole.saved.close()
    return request.param, state


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("again", [("1f1b", 2), *swept([("zbv", 2), ("1f1b", 1)], [])])
def test_a_run_goes_on_with_the_same_bits(
    tmp_path: Path, again: tuple[str, int], undisturbed: tuple[bool, dict[str, Any]]
) -> None:
    tied, expected = undisturbed
    model = {"tied": tied}
    first = Run(tmp_path / "cut", "1f1b", 2, model=model)
    first.train(3)
    memory = Run(tmp_path / "cut", *again, model=model)
    assert memory.train(4) == 2, "the state behind the last update was not copied yet"
    memory.saved.close()
    disk = Run(tmp_path / "cut", *again, model=model)
    assert disk.train(STEPS) == 4
    state = disk.state()
    disk.saved.close()
    near = 1e-12 if tied and again != ("1f1b", 2) else 0.0  # another order of sums over a tied weight
    assert [name for name in expected if not torch.allclose(state[name], expected[name], near, near)] == []


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.slow
def test_killed_ranks_lose_nothing(tmp_path: Path) -> None:
    """A run goes on behind each kill, from memory and from disk, with the bits of an undisturbed one."""
    cases = thinned([
        Case("1f1b", ((0, "flip", 1, 0),)),
        Case("1f1b", ((1, "meeting", 0, 0),)),  # the keeper of the first attempt goes on meanwhile
        Case("1f1b", ((1, "SEND", 0, 3),), keeper=0.1),
        Case("1f1b", ((0, "copied", 1, 1), (1, "update", 1, 2))),
        Case("zbv", ((1, "I", 1, 40),), keeper=0.2),
        Case("zbv", ((0, "clear", 1, 0),)),
        Case("zbv", ((1, "agree", 1, 0),), keeper=0.0),
        Case("zbv", ((0, "updated", 0, 0),)),
    ], 3)  # fmt: skip
    chains = list(killed_trainings(cases, 2, tmp_path))
    assert sum(count for count, _ in chains) == len(cases)
    assert [why for _, wrong in chains for why in wrong] == []


@pytest.mark.sweep
@pytest.mark.slow
def test_a_killed_flush_is_ended_by_the_next() -> None:
    calls, failures = killed_flushes(every=swept(1, 3))
    assert calls >= 40, "each call of the system is a place to be killed at, and so is one of the next flush"
    assert failures == []


@pytest.mark.slow
def test_a_durable_state_stays_in_memory_until_it_is_on_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A keeper that comes late finds the state. The next state due meanwhile is copied as soon as an image is free."""
    run = Run(tmp_path / "run", "1f1b", 2, durable=3, keep=9)
    watch = run.saved.places.watch()
    assert watch is not None
    os.kill(watch.process.pid, signal.SIGSTOP)
    try:
        run.train(8)
    finally:
        os.kill(watch.process.pid, signal.SIGCONT)
    assert run.saved.left_out == 3, "steps 5, 6 and 7: one image has step 3, and the other the newest that all have"
    deadline = time.monotonic() + 30.0
    while committed_steps(run.saved.root) != [3] and time.monotonic() < deadline:
        time.sleep(0.02)
    run.saved.train(*next(run.batches))
    run.optimizer.step()
    run.saved.close()
    assert committed_steps(run.saved.root) == [3, 8, 9]
    assert sorted(path.name for path in run.saved.root.glob("step-*")) == [f"step-{n:08}" for n in (3, 8, 9)]
    assert (
        capfd.readouterr().err.count("step 6 was due on disk while an older one was still being written; step 8") == 1
    )


@pytest.mark.parametrize("lacks", ["an image", "room"])
def test_a_step_that_cannot_be_committed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    root = tmp_path / "run"
    places, ranks = held(root, tmp_path, 1)
    assert flush.flush(places, ranks, 1) is not None
    held(root, tmp_path, 2)
    if lacks == "an image":
        places.image_paths(1)[0].unlink()
        assert flush.flush(places, ranks, 2) is None
    else:
        monkeypatch.setattr(flush, "commit", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            flush.flush(places, ranks, 2)
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert not any(image.read_now for rank in (0, 1) for image in places.images(rank))


def test_a_step_whose_images_are_replaced_is_written_from_the_new_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that begin an attempt replace the state from which they go on, one after the other."""
    root = tmp_path / "run"
    places, ranks = held(root, tmp_path, 1, ["first", "second"])
    for rank in ranks:
        places.introduce(rank)
    keeper = Keeper(places)
    keeper._meet()
    for attempts, committed in ((), []), (("second", "second"), [1]):
        if attempts:
            held(root, tmp_path, 1, attempts)
            keeper._meet()
        keeper._durable()
        keeper._join()
        assert committed_steps(root) == committed
    held(root, tmp_path, 2, ["second", "third"])
    keeper._meet()
    keeper._newest(told=True)  # ranks have ended: nobody brings a better image
    assert capfd.readouterr().err.count("could not be written") == 1
    image = held(root, tmp_path, 3)[0].images(1)[1]
    image.write(b"x", image.header().tensors + TENSORS)  # the description
    keeper._meet()
    keeper._durable()
    keeper._join()
    assert "step 3 could not be written: the image of rank 1" in capfd.readouterr().err
    assert committed_steps(root) == [1]


def test_ranks_that_have_ended_by_themselves_are_not_ended_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that its parent has waited for can take no signal. The keeper writes the last state of the ranks."""
    root = tmp_path / "run"
    places, ranks = held(root, tmp_path, 1)
    agent, *children = (subprocess.Popen(["sleep", "60"]) for _ in range(3))
    for rank, child in zip(ranks, children, strict=True):
        places.introduce(rank._replace(process=process_here(child.pid), agent=process_here(agent.pid)))
    keeper = Keeper(places)
    keeper._meet()
    for process in (agent, *children):
        process.kill()
        process.wait()
    keeper._end_orphans()
    assert "its 2 ranks end too" in capfd.readouterr().err, "the keeper has not looked at them since"
    keeper.run()
    assert committed_steps(root) == [1]


class _Written(TorchDispatchMode):
    """operations: [calls of torch that write into tensors] name and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.operations.append((func._schema.name, sum(each.nbytes for each in tree_leaves(args[0]))))
        return func(*args, **kwargs or {})


def test_a_copy_of_a_state_writes_each_byte_once(tmp_path: Path) -> None:
    """`benchmarks/resilience.py block` has its time."""
    boxes = [HeldBox(f"model.{number}", torch.ones(1000), (1000,), (0,)) for number in range(24)]
    writer = ImageWriter(Places.of_run(tmp_path, "written"), 0, state_size(boxes))
    for number in (0, 1, 0):
        with _Written() as seen:
            writer.write(number, boxes, number, False, {"attempt": "", "facts": {}, "run": {}})
    writer.close()
    assert seen.operations == [("aten::_foreach_copy_", 24 * 4000)]
