"""A job that is restarted at the store which earlier attempts left: every attempt is its own."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from runtime.ranks.attempts import run_attempts
from schedc_runtime.errors import PartitionError, StepTimeout
from schedc_runtime.ranks.join import end_with_cause, meet_ranks
from support.sweeps import swept

FAULTS = [*swept(["before joining"], []), "before building", *swept(["raise"], []), "kill", "raise", ""]
"""The attempts of one job; the last one trains to the end."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[list[Any]]]:
    """What every rank did, by case; `trainer`: in each attempt."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    attempts = [
        # A restart for a new node is not counted: three attempts bear the same number.
        attempt("trainer", 2, agent | {"TORCHELASTIC_RESTART_COUNT": number // 3}, fault=fault)
        for number, fault in enumerate(FAULTS)
    ]
    others = {"several": (3, own_store()), "store_lost": (2, own_store()), "one_list": (4, agent), "broken": (2, agent)}
    others["leaving"] = (2, agent)
    attempts += [attempt(case, *where) for case, where in others.items()]
    done = run_attempts(attempts)
    return {"trainer": done[: len(FAULTS)], **dict(zip(others, done[len(FAULTS) :], strict=True))}


def attempt(case: str, ranks: int, environment: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return {
        "case": f"runtime.ranks.restart_cases:{case}",
        "ranks": ranks,
        "environment": environment,
        "arguments": arguments,
    }


def own_store() -> dict[str, Any]:
    """Where rank 0 is to hold the store, as without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=FAULTS)
def test_an_attempt_meets_its_own_failure_and_no_other(number: int, outcomes: dict[str, list[Any]]) -> None:
    first, second = outcomes["trainer"][number]
    match FAULTS[number]:
        case "raise":
            assert second[:2] == ["raised", "InstructionError"]
            assert first[:2] == ["raised", "PeerFailure"]
            assert "rank 1 failed at 1F1" in first[2]
        case "kill":
            assert second == ["died", 9]
            assert first[:2] == ["raised", "PeerFailure"]
            assert "is dead" in first[2]
            assert "it was in step 2 at 1F1 --> 1f1b.sched:" in first[2]
        case "":
            assert first[0] == second[0] == "returned"
            assert first == second
        case _:
            assert second == ["died", 256]
            assert first[:3] == ["raised", "StepTimeout", "rank 1 did not join rank 0 within 2 s"]


@pytest.mark.processes
def test_pipelines_of_a_group_in_a_job_of_the_users_own(outcomes: dict[str, list[Any]]) -> None:
    alone, first, second = outcomes["several"]
    assert alone == ["returned", []]
    assert first == second
    (before, after) = first[1]
    assert before == after


@pytest.mark.processes
def test_the_death_of_the_rank_that_held_the_store_is_told(outcomes: dict[str, list[Any]]) -> None:
    dead, (_, (kind, text, seconds)) = outcomes["store_lost"]
    assert dead == ["died", 9]
    assert kind == "PeerFailure"
    assert text.startswith("rank 0 (pid ")
    assert "is dead" in text
    assert float(seconds) < 10, "not after the timeout of 20 s"


@pytest.mark.processes
def test_one_survivor_lists_all_ranks_and_the_others_refer_to_it(outcomes: dict[str, list[Any]]) -> None:
    first, dead, third, fourth = outcomes["one_list"]
    assert dead == ["died", 9]
    texts = [text for _, (kind, text) in (first, third, fourth) if kind == "PeerFailure"]
    assert len(texts) == 3
    assert len({text.splitlines()[0].partition(":")[0] for text in texts}) == 1, "all name the same rank"
    (whole,) = (text for text in texts if "where every rank stands:" in text)
    assert [line.split()[1] for line in whole.splitlines()[-4:]] == ["0", "1", "2", "3"]
    for cause, reference, *_ in map(str.splitlines, texts):
        assert "it was in step 2 at 1F0 --> 1f1b.sched:" in cause
        assert reference in whole or re.fullmatch("the error of rank [023] lists where every rank stood", reference)


@pytest.mark.processes
def test_a_broken_connection_is_no_timeout(outcomes: dict[str, list[Any]]) -> None:
    assert [(kind, rank) for _, (kind, rank, _) in outcomes["broken"]] == [("PeerFailure", f"rank {n}") for n in (1, 0)]
    texts = [text for _, (*_, text) in outcomes["broken"]]
    for text in texts:
        assert re.match("rank [01] lost the connection with rank [01] in step 2 at ", text)
        assert "dead" not in text
    assert sum("where every rank stands:" in text for text in texts) == 1


@pytest.mark.processes
def test_a_trainer_that_closes_nothing_ends_well(outcomes: dict[str, list[Any]]) -> None:
    """The thread that reports to the store ends before the interpreter does."""
    assert outcomes["leaving"] == [["returned", None]] * 2


def test_nobody_takes_an_old_proposal_for_the_new_one() -> None:
    """A rank that comes first finds the proposal of an earlier attempt, confirmed or not, and waits for its own."""
    store = HashStore()
    for confirmed in (False, True):
        store.set("schedc/run/join/proposal", "0-old")
        if confirmed:
            store.set("schedc/run/join/0-old/confirmed", "some others")
        with pytest.raises(StepTimeout, match=r"rank 1 waited 0\.1 s for rank 0 to join"):
            meet_ranks(store, "join", 1, ["rank 0", "rank 1"], 0.1)


def test_a_process_alone_meets_at_once() -> None:
    store = HashStore()
    first, second = (meet_ranks(store, "join", 0, ["rank 0"], 1.0) for _ in range(2))
    first.set("failed", "once")
    assert not second.check(["failed"])


def test_torchrun_ends_with_the_cause_and_its_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    end_with_cause(tmp_path / "error.json")
    for cause in ("the model has one layer", "what followed"):
        error = PartitionError(cause, "give it another one")
        sys.excepthook(PartitionError, error, None)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    lines = str(ChildFailedError("trainer.py", {0: failure})).split("\n")
    last = [line.strip() for line in lines if line.strip(" =")][-2:]
    assert last == ["traceback : PartitionError: the model has one layer", "= help: give it another one"]
