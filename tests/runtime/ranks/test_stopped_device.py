"""A device or a rank that stops for ever. All ranks name it in time and give up, and their processes fail."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedc
import schedc_runtime
from schedc.interrupts import end_with
from schedc.ir.program import InstructionKind
from schedc_runtime import Pipeline
from schedc_runtime.device.choice import gpu
from schedc_runtime.device.cpu import CpuDevice
from schedc_runtime.device.limits import DeviceLate, HostLimit, await_event, limited
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.places import DevicePlaces, Late
from schedc_runtime.ranks.join import join
from schedc_runtime.testing import PRELOADED, pool
from support.runtime_cases import next_token_loss, small_gpt, tokens

LIMIT = 1.0


@pytest.mark.processes
def test_the_first_instruction_that_a_device_has_not_ended_is_named() -> None:
    answers = pool(2).run("runtime.ranks.fault_cases:stopped_device")
    for (kind, text), seconds, left in answers:
        assert kind == "StepTimeout"
        assert "rank 1 gave up at the end of step 2, sharing the loss\n  the device has ended nothing for 1 s\n" in text
        first, second = text.partition("instructions not ended:\n")[2].splitlines()[:2]
        assert first.startswith("    1WAIT_RECV_F2: wait for the activation of stage 0, microbatch 2 from rank 0 --> ")
        assert second.startswith("    1F2 (stage 1, microbatch 2) --> 1f1b.sched:")
        assert LIMIT <= seconds < LIMIT + 5
        assert left == ["abort", "destroy"]
    (_, other), (_, own) = (told for told, _, _ in answers)
    assert "rank 1 is at the end of step 2, sharing the loss, its device at 1F2 --> 1f1b.sched" in own
    assert "= help: the cause is the rank whose host or device stands elsewhere" in own
    assert other.endswith("the error of rank 1 lists where every rank stood")


@pytest.mark.processes
def test_a_host_that_waits_inside_an_op_gives_up_there() -> None:
    answers = pool(2).run("runtime.ranks.fault_cases:stopped_device", inside=True)
    for (kind, text), seconds, _ in answers:
        assert kind == "StepTimeout"
        assert "rank 1 gave up in step 2 while the host is at 1F2\n  the device has ended nothing for 1 s" in text
        assert seconds < LIMIT + 5
    assert "\n  rank 0 is in step 2 at 0WAIT_RECV_B2: " in answers[1][0][1]


class Stopped(CpuDevice):
    """A device whose event comes at the ``number``-th look."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.looks = number, 0

    def reached(self, event: object, seconds: float) -> bool:
        self.looks += 1
        time.sleep(seconds / 4)
        return self.looks >= self.number


class Places(CpuDevice):
    """A device that has come to some of its events, which are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.ended = 0, 0
        self.captured = False

    def record(self, stream: object = None) -> int:  # type: ignore[override]
        self.recorded += 1
        return self.recorded

    def is_captured(self) -> bool:
        return self.captured

    def reached(self, event: int, seconds: float) -> bool:
        return event <= self.ended


def test_the_place_of_a_device_is_the_first_event_that_it_has_not_come_to() -> None:
    """Also that of the call before: a rank that waits for nothing posts the next step behind a device that stopped."""
    rows, device = [(0, 1), (2,), (3, 5)], Places()
    places, seen = DevicePlaces(device, rows), []
    for _ in range(3):  # of three calls the last two are kept
        places.begin()
        for _ in rows:
            places.passed()
    for device.ended in range(10):
        seen.append(places.late())
    before, now = ([Late(each, which) for each in rows] for which in (True, False))
    assert seen == [before[0], before[0], before[0], *before, *now, None]
    places.begin()
    device.captured = True
    places.passed()
    assert (device.recorded, places.late()) == (9, None)


def test_marks_stand_behind_ops_and_the_last_wait() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(small_gpt(blocks=2), program, loss_fn=next_token_loss, in_process=True)
    pipe._bound_code.marked = True
    pipe.step(*tokens(4))
    (executors,) = [bound.executors for bound in pipe._bound_code._bound.values()]
    for place, executor in executors.items():
        places, kinds = executor.places, program.kind
        assert places is not None
        listed = [row for rows in places._rows for row in rows]
        posts = (InstructionKind.SEND, InstructionKind.RECV)
        mine = [row for row in range(len(kinds)) if program.rank[row] == place.pipeline and kinds[row] not in posts]
        assert listed == mine
        last = [program.instruction(rows[-1]).kind for rows in places._rows]
        assert set(last[:-1]) <= {InstructionKind.F, InstructionKind.B}
        assert len(places._events) == len(places._rows)


def test_the_limit_counts_from_the_last_progress() -> None:
    came, slow = Stopped(7), Stopped(9)
    with limited(HostLimit(0.4, lambda: came.looks % 2 == 0)):
        await_event(came, came.record())
    assert came.looks == 7
    with limited(HostLimit(0.02, lambda: False)), pytest.raises(DeviceLate, match=r"ended nothing for 0\.02 s"):
        await_event(slow, slow.record())
    await_event(slow, slow.record())  # no limit holds outside


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "300"])
def test_a_limit_that_cannot_pass_is_refused(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rf"timeout={seconds!r} is no time that a rank can wait\n  = help: give seconds above 0"
    program = schedc.compile("1f1b", P=1, M=1)
    with pytest.raises(RuntimeFault, match=told):
        Pipeline(nn.Linear(2, 2), program, loss_fn=None, timeout=seconds)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeFault, match=told):
        schedc_runtime.join(timeout=seconds)


class Communicators:
    """The backend of NCCL behind a group, which writes down what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class Group:
    """A process group. broken: its abort fails."""

    def __init__(self, name: str, calls: list[str], broken: bool = False) -> None:
        self.name, self.calls, self.broken = name, calls, broken

    def _get_backend(self, device: torch.device) -> Communicators:
        return Communicators(self.calls)

    def abort(self) -> None:
        self.calls.append(f"abort {self.name}")
        if self.broken:
            raise RuntimeError("aborted before")


def test_all_communicators_are_aborted_in_one_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Communicators, raising=False)
    calls: list[str] = []
    gpu.abort_groups([Group("a", calls), Group("b", calls)])  # type: ignore[list-item]
    assert calls == ["start", "abort a", "abort b", "end"]
    assert gpu.carries(Group("a", calls))  # type: ignore[arg-type]
    del calls[:]
    with pytest.raises(RuntimeError):
        gpu.abort_groups([Group("a", calls, broken=True)])  # type: ignore[list-item]
    assert calls[-1] == "end"
    assert [gpu.group_limit(name, 300.0) for name in ("gloo", "nccl", "cpu:gloo,cuda:nccl")] == [300.0, 660.0, 660.0]


@pytest.mark.processes
def test_processes_of_a_job_with_a_stopped_rank_fail(tmp_path: Path) -> None:
    """Rank 1 sends nothing more. Rank 0 ends with an error, upon which a launcher ends the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started = [context.Process(target=job, args=(rank, store.port, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in started:
        process.start()
    working, stopped = started
    working.join(60)
    assert working.exitcode == 1
    stopped.terminate()
    stopped.join(10)
    assert stopped.exitcode == -15
    told = (tmp_path / "0").read_text()
    assert "rank 0 gave up in step 1 at 0WAIT_" in told
    assert "\n  rank 1 is in step 1 at 1F1 --> 1f1b.sched:" in told
    last = (tmp_path / "1").read_text().splitlines()[-1]
    assert last.endswith("rank 1 was ended by SIGTERM; it was in step 1 at 1F1 --> 1f1b.sched:12:36 (phase steady)")


def job(rank: int, port: int, folder: str) -> None:
    """One process of a job of two, whose errors go into a file."""
    end_with(os.getppid())
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(
        RANK=f"{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(1)
    join("gloo", timeout=30)
    model = small_gpt(blocks=2)
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, timeout=LIMIT)
    if rank == 1:
        stop_at(model.blocks[1], 1, lambda: time.sleep(60))
    pipe.step(*tokens(4))


def stop_at(block: nn.Module, number: int, act: Callable[[], None]) -> None:
    """Act behind the ``number``-th call of a block with real tensors."""
    from runtime.ranks.fault_cases import on_call

    on_call(block, number, lambda output: act())
