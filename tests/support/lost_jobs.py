"""A job of two nodes under torchrun loses one of them, with its agent, keeper and memory. Another one joins.

Nodes are agents of this machine whose ranks have their images in folders of their own, in `support.restarted_ranks`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from support.kept_runs import Run, bits
from support.restarted_jobs import Outcome, outcome_in, run_job
from support.restarted_ranks import SCHEDULE

COPIES = ("now", "beside")
"""The ways in which a state is copied into images. Each is a case."""
EACH, STEPS, VICTIM = 2, 40, 1
"""Ranks of a node, updates of a training, and the number of the node that is lost."""
_JOB = 120.0
"""Seconds in which a job must have ended."""


def flaws(copies: Sequence[str] = COPIES) -> list[str]:
    """What is wrong with jobs that have lost a node. They run at the same time."""
    whole = _undisturbed()
    with ThreadPoolExecutor(len(copies)) as threads:
        outcomes = list(threads.map(lost, copies))
    whys = [_flaw(*outcome, whole) for outcome in outcomes]
    return [f"copy={copy}: {why}" for copy, why in zip(copies, whys, strict=True) if why]


def lost(copy: str) -> tuple[Outcome, int]:
    """How a training ended that has lost a node, and the newest state that neighbours had then; -1 if none was lost.

    copy: of `Checkpoints`.
    """
    with TemporaryDirectory() as place:
        folder = Path(place)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        agents = [_start(folder, copy, node, port) for node in range(2)]
        deadline = time.monotonic() + _JOB
        while len([*folder.glob("*.agent")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        for agent in [*agents, _start(folder, copy, 2, port)]:
            agent.join()
        struck = folder / "struck"
        return outcome_in(folder), int(struck.read_text()) if struck.exists() else -1


def _start(folder: Path, copy: str, node: int, port: int) -> threading.Thread:
    """Start the agent of a node. Two nodes take part in a round, and a third one waits for a place."""
    host = "true" if node == 0 else "false"
    settings = f"is_host={host},keep_alive_interval=1,keep_alive_max_attempt=4"
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "lost", "--rdzv-conf", settings]
    meeting += ["--local-addr", "127.0.0.1"]
    arguments = [str(folder), copy, str(VICTIM), str(STEPS), str(node)]
    thread = threading.Thread(target=run_job, args=(arguments, EACH, 1, _JOB, meeting))
    thread.start()
    return thread


def _undisturbed() -> str:
    """The digest of a training that loses nothing, all ranks of which are in this process."""
    with TemporaryDirectory() as place:
        run = Run(Path(place), SCHEDULE, 2 * EACH, durable=STEPS)
        run.train(STEPS)
        digest = bits(run.state())
        run.saved.close()
        run.pipe.close()
        return digest


def _flaw(outcome: Outcome, held: int, whole: str) -> str:
    """What is wrong with a job that has lost a node; "" if it went on from a neighbour's copies with the same bits.

    held: the newest state that neighbours had. whole: the digest of an undisturbed end.
    """
    if held < 0 or outcome.first < held:
        return f"neighbours had state {held}, and it went on at {outcome.first}: {outcome.printed[-2000:]}"
    if f"step {outcome.first} from neighbours" not in outcome.printed:
        return f"no bits came from a neighbour: {outcome.printed[-2000:]}"
    if outcome.digest != whole:
        return "it ended with other bits"
    return f"left behind: {', '.join(outcome.left)}" if outcome.left else ""
