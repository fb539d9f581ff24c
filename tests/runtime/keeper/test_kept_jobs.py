"""Jobs whose states are kept: they go on behind a fault, end within seconds, leave nothing, and go on with fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks import agent
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.testing import pool
from support.ended_jobs import Case, ended, flaw
from support.paths import ROOT
from support.restarted_jobs import judged, train
from support.sweeps import halved, swept

pytestmark = pytest.mark.processes

RANKED = """
import atexit, os, sys
def tell(*words):  # in one write, beside other ranks
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
tell("rank", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.getppid(), *sys.argv[1:])
atexit.register(tell, "left", os.environ["RANK"])
tell("loaded", "torch" in sys.modules, "beside", sys.path[0])
from schedc_runtime.ranks.agent import agent_here, spare_here
spare, agent = spare_here(), agent_here()
tell("found", spare.pid, agent.pid)
if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10":
    raise KeyError("planted")
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time
    time.sleep(60)
sys.exit()
"""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_training_goes_on_behind_each_fault() -> None:
    """`benchmarks/resilience.py restart` has more faults, on four ranks."""
    whole = train(ranks=2).digest
    for fault, victim in (("memory", 1), ("agent", 1), ("keeper", 0))[: swept(3, 1)]:
        outcome = train(fault, victim, ranks=2)
        assert judged(fault, victim, outcome, whole) == "", fault


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    halved(
        [
            Case("torchrun", "launcher", signal.SIGTERM),
            Case("schedc run", "launcher", signal.SIGTERM),
            Case("schedc run", "rank", signal.SIGKILL),
            Case("torchrun", "launcher", signal.SIGKILL),
        ]
    ),
)
def test_a_job_that_is_ended_keeps_its_newest_step_and_leaves_nothing(case: Case) -> None:
    assert flaw(case, ended(case, warm=True)) == ""


@pytest.mark.slow
def test_ranks_of_schedc_torchrun_are_forked_from_a_spare_in_each_attempt(tmp_path: Path) -> None:
    """A rank ends as under torchrun: its error is printed, its exit functions are called, its status is the job's."""
    (tmp_path / "trainer.py").write_text(RANKED)
    paths = os.pathsep.join(str(ROOT / each) for each in ("", "runtime"))
    done = subprocess.run(
        [sys.executable, "-m", "schedc", "torchrun", "--nproc-per-node", "2", "--max-restarts", "1",
         str(tmp_path / "trainer.py"), "--of-the-trainer", "7"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    ranks = [line[1:] for line in told if line[0] == "rank"]
    spare, *_ = {line[2] for line in ranks}
    assert sorted(ranks) == sorted([r, n, spare, "--of-the-trainer", "7"] for r in "01" for n in "01")
    assert {line[1] for line in told if line[0] == "found"} == {spare}
    assert len({line[2] for line in told if line[0] == "found"} - {spare}) == 1, "the agent is another process"
    assert {tuple(line[1:]) for line in told if line[0] == "loaded"} == {("True", "beside", str(tmp_path))}
    assert sorted(line[1] for line in told if line[0] == "left") == ["0", "1", "1"], "one was ended by SIGTERM"
    assert "KeyError: 'planted'" in done.stderr


def test_spares_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFault, match="schedc torchrun"):
        agent.check_spares(1)
    with pytest.raises(RuntimeFault, match="any number of ranks"):
        agent.check_spares(2)
    monkeypatch.setenv(agent.SPARE, str(os.getppid()))
    monkeypatch.setenv(agent.AGENT, "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    agent.check_spares(1)
    assert agent.agent_here() == agent.process_here(1)
    assert next(agent.told_spare()).startswith(f"  the spare (pid {os.getppid()})")
    monkeypatch.setenv(agent.SPARE, str(os.getpid()))
    assert agent.spare_here() is None, "an environment that a child of a rank has inherited"


def test_an_updates_batch_is_shared_by_fewer_replicas() -> None:
    assert [Mesh(2, data=data).calls(4) for data in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(RuntimeFault, match=r"by 3 replicas\n.*processes: 2, 4, 8$"):
        Mesh(2, data=3).calls(4)
    with pytest.raises(RuntimeFault, match=r"processes: 4, 8$"):
        Mesh(2, experts=2, data=4).calls(4)
    with pytest.raises(RuntimeFault, match="multiple of 2"):
        Mesh(2, experts=2).calls(1)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_replicas_and_the_same_batch(tmp_path: Path) -> None:
    case = "support.shrunk_runs:shrunk_run"
    whole = pool(4).run(case, root=str(tmp_path / "whole"), steps=4)[0]
    pool(4).run(case, root=str(tmp_path / "run"), steps=2)
    first, values, said = pool(2).run(case, root=str(tmp_path / "run"), steps=4)[0]
    assert (whole[0], first) == (0, 2)
    assert values == pytest.approx(whole[1], rel=1e-9), "sums over replicas associate otherwise, and no more"
    assert "not the same bits: replicas, 2 before and 1 now; for the same batch each makes 2 x the calls" in said
    assert "not the same bits" not in whole[2]
