"""What is said of a process that runs, is stopped, frozen or gone, and of how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schedc_runtime.ranks.processes import Condition, Process, has_ended, process_condition, this_process
from schedc_runtime.ranks.progress import PeerProgress, Position, Progress, mark
from schedc_runtime.testing import pool
from support.warm_command import run_python


def process_of(pid: int) -> Process:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return this_process()._replace(pid=pid, started=int(stat[19]))


def settled(process: Process, expected: Condition) -> Condition:
    """The condition, as soon as it is the ``expected`` one; signals and the start of a command take a moment."""
    deadline = time.monotonic() + 10
    while (now := process_condition(process)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


@pytest.mark.processes
def test_stopped_and_killed_are_told_apart() -> None:
    assert process_condition(this_process()) == Condition(False, False, "")
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        process = process_of(sleeper.pid)
        try:
            for act, expected in (
                (lambda: None, Condition(False, False, "")),
                (
                    lambda: sleeper.send_signal(signal.SIGSTOP),
                    Condition(False, True, "stopped by a signal (SIGCONT lets it go on)"),
                ),
                (sleeper.kill, Condition(True, False, "killed by SIGKILL")),  # nobody has waited for it yet
            ):
                act()
                assert settled(process, expected) == expected
        finally:
            sleeper.kill()
    assert process_condition(process) == Condition(True, False, "its process has ended")


def own_rank(rank: int, _world_size: int) -> int:
    return rank


@pytest.mark.processes
def test_ranks_of_a_pool_are_stopped_between_cases() -> None:
    ranks, stopped = pool(2), Condition(False, True, "stopped by a signal (SIGCONT lets it go on)")
    for _ in range(2):
        assert ranks.run("runtime.ranks.test_processes:own_rank") == [0, 1]
        assert [settled(process_of(worker.pid or 0), stopped) for worker in ranks._workers] == [stopped] * 2


_HOLDS_A_POOL = """
import time
from schedc_runtime.testing import pool
if __name__ == "__main__":
    pool(1).run("operator:add")
    print(pool(1)._workers[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_stopped_ranks_end_with_tests_that_are_killed(tmp_path: Path) -> None:
    (tmp_path / "tests.py").write_text(_HOLDS_A_POOL, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(tmp_path / "tests.py")], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        rank = process_of(int(tests.stdout.readline()))
        tests.kill()
    gone = Condition(True, False, "its process has ended")
    assert settled(rank, gone) == gone


def test_a_later_process_of_the_same_id_is_another() -> None:
    earlier = this_process()._replace(started=1)
    assert process_condition(earlier) == Condition(True, False, "its process has ended")


def test_a_frozen_process_runs_no_more(tmp_path: Path) -> None:
    """Tables as the kernel shows them: freezing a control group takes rights that a test has not."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a name) with) S " + "0 " * 18 + "55" + " 0" * 32)
    (tmp_path / "7/cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    process = Process("here", "host", 7, 55)
    for frozen, why in ((True, "frozen with its cgroup"), (False, "")):
        (tmp_path / "job/cgroup.events").write_text(f"populated 1\nfrozen {frozen:d}\n")
        assert process_condition(process, proc=tmp_path, cgroups=tmp_path) == Condition(False, frozen, why)


def test_progress_is_read_by_others_as_it_was_at_the_end() -> None:
    page = Progress()
    page.begin(1, ["", "run forward of 0.experts"])
    page.say("in step 7")
    peer = PeerProgress(os.getpid(), page.descriptor)
    assert peer.read() == Position("in step 7", 1, -1, "", call=1)
    page.word[0] = mark(41, 1)
    page.close()
    del page
    assert peer.read() == Position("in step 7", 1, 41, "run forward of 0.experts", call=1)


def test_parts_beyond_what_a_mark_can_tell_apart_are_left_out() -> None:
    page = Progress()
    page.begin(0, [f"part {number}" for number in range(20_000)])
    page.say("in step 1")
    page.word[0] = mark(3, 19_999)
    assert page.read() == Position("in step 1", 0, 3, "", call=1)
    page.close()


RANKS = """
import os, signal
def main(signals):
    if sent := signals[int(os.environ["RANK"])]:
        os.kill(os.getpid(), getattr(signal, sent))
    return 0
"""

LAUNCHER = """
import sys
from schedc_runtime.commands import launch
launch._GRACE = 600.0
sys.path.insert(0, sys.argv[1])
sys.exit(launch.launch("ranks_of_a_test", sys.argv[2:], len(sys.argv[2:])))
"""


@pytest.mark.processes
def test_the_launcher_ends_with_1_and_names_who_was_killed(tmp_path: Path) -> None:
    (tmp_path / "ranks_of_a_test.py").write_text(RANKS)
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    # It ends long before the grace: who is stopped is not waited for.
    done = run_python([str(launcher), str(tmp_path), "", "SIGKILL", "SIGSTOP"])
    assert done.returncode == 1
    assert re.findall(r"rank (\d) \(pid \d+\) was ended by (\w+)", done.stderr) == [("1", "SIGKILL")]


def test_the_short_look_sees_who_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = process_of(child.pid)
        assert not has_ended(process)
        assert has_ended(process._replace(started=process.started - 1))
        child.kill()
        while not process_condition(process).ended:
            pass
        assert has_ended(process), "a zombie has ended"
    assert has_ended(process)
