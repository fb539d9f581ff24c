"""The last steps of a rank outlive it, and become traces that can be diagnosed."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

import schedc
from schedc.diagnose.open_traces import open_traces
from schedc_runtime import Pipeline, watch_speed
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.speed.ring import STEPS, KeptStep, RunStream, StepRing, kept_steps, write_traces
from schedc_runtime.testing import pool
from support.runtime_cases import small_gpt

SHORT = RunStream("a schedule", ["0F0", "0SEND_F0", "0B0"], [True, False, True])
LONG = RunStream("a schedule", [f"0F{m}" for m in range(5)], [True] * 5)


def run(ring: StepRing, step: int, stream: RunStream, came: int) -> None:
    """A step of which ``came`` instructions end."""
    times = ring.begin(step, stream)
    for place in range(came):
        times.spent[place] += 10 * step + place
        times.ended[place] = time.perf_counter_ns()


def names(steps: list[KeptStep]) -> list[tuple[int, bool, int]]:
    return [(step.step, step.whole, len(step.ends)) for step in steps]


def test_a_killed_process_leaves_its_last_steps_and_how_far_it_came(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.times"
    if (pid := os.fork()) == 0:
        ring = StepRing(path, note=100)
        for step in range(1, 41):
            run(ring, step, SHORT, 3)
            ring.end({"collections": step})
        run(ring, 41, SHORT, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    steps = kept_steps(path)
    assert names(steps) == [*((step, True, 3) for step in range(10, 41)), (41, False, 2)]
    assert len(steps) == STEPS
    assert steps[0].note == {"collections": 10}
    assert steps[-1].spent == [410, 411]
    now = time.time_ns()
    for step in steps:
        assert now - 60e9 < step.begin <= step.ends[0] <= step.ends[-1] <= now
    assert all(before.ends[-1] <= after.begin for before, after in pairwise(steps))


def test_streams_of_other_lengths_have_names_of_their_own(tmp_path: Path) -> None:
    ring = StepRing(tmp_path / "rank-0000.times", note=8)
    run(ring, 1, SHORT, 3)
    ring.end({"too long": "for its place"})
    run(ring, 2, LONG, 5)
    ring.end()
    run(ring, 3, SHORT, 3)
    ring.end()
    found = kept_steps(ring.path)
    assert [(step.step, step.stream) for step in found] == [(2, LONG), (3, SHORT)]  # a longer stream begins a file
    assert [step.note for step in found] == [{}, {}]


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    ring = StepRing(tmp_path / "rank-0000.times")
    run(ring, 1, SHORT, 3)
    ring.end()
    whole = ring.path.read_bytes()
    assert len(kept_steps(ring.path)) == 1
    for place in (0, 9, 16, 24, 4096):  # magic, version, sizes, streams
        other = bytearray(whole)
        other[place] ^= 0xFF
        ring.path.write_bytes(other)
        with pytest.raises(RuntimeFault, match="is no file of the last steps"):
            kept_steps(ring.path)
    ring.path.write_bytes(whole[:-1])
    with pytest.raises(RuntimeFault, match="sizes do not add up"):
        kept_steps(ring.path)
    with pytest.raises(RuntimeFault, match="all of its 0 files"):
        write_traces(tmp_path / "nowhere", tmp_path)


def test_a_level_without_its_folder_or_processes_is_refused(tmp_path: Path) -> None:
    pipe = Pipeline(small_gpt(2), schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, in_process=True)
    with pytest.raises(RuntimeFault, match="has no folder"):
        watch_speed(pipe, level=1)
    with pytest.raises(RuntimeFault, match="ranks of one process"):
        watch_speed(pipe, level=1, folder=tmp_path)
    with pytest.raises(RuntimeFault, match="no level 7"):
        watch_speed(pipe, level=7)
    pipe.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_rank_leaves_traces_beside_its_run(tmp_path: Path) -> None:
    """The keeper brings the files to disk before the images go."""
    root = tmp_path / "run"
    given = {"root": str(root), "schedule": "dualpipev", "steps": 6, "kills": [[1, "B", 3, 0]], "watched": True}
    given |= {"copy": "beside", "printed": str(tmp_path / "printed")}  # pieces move the rows of the program
    outcomes = pool(2).outcomes("support.kept_runs:kept_run", **given)
    assert getattr(outcomes[1], "kind", "") == "died"
    deadline = time.monotonic() + 20
    while len(list((root / "last-steps").glob("*.times"))) < 2:
        assert time.monotonic() < deadline, "nothing was brought to disk"
        time.sleep(0.02)
    dead, alive = (
        kept_steps(root / "last-steps" / "rank-0001.times"),
        kept_steps(root / "last-steps" / "rank-0000.times"),
    )
    assert [(step.step, step.whole) for step in dead] == [(1, True), (2, True), (3, True), (4, False)]
    assert len(dead[-1].ends) < len(dead[-1].stream.names)
    assert "B" in dead[-1].stream.names[len(dead[-1].ends)]  # it was killed in a backward
    reported = re.findall(
        r"rank 1 \(pid \d+\) is dead: [^;]*; it was in step 4 at (\S+) -->", (tmp_path / "printed").read_text()
    )
    assert reported == [dead[-1].stream.names[len(dead[-1].ends)]]
    assert not alive[-1].whole
    for step in dead[:-1]:
        assert 0 < sum(step.spent) < 2 * (step.ends[-1] - step.begin)
        assert all(begin <= end for begin, end in pairwise([step.begin, *step.ends]))
        assert 64 + 16 * len(step.stream.names) <= 3 * 1024
    traces = write_traces(root / "last-steps", tmp_path / "traces")
    assert [path.name for path in traces] == [f"step-{n:08}.json" for n in (1, 2, 3)] + ["cut-00000004.trace"]
    assert abs(open_traces([tmp_path / "traces"]).residual).max() < 0.2  # the times add up to the steps
