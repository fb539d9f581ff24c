"""Attempts of a job on real processes, as torch's elastic agent starts them, without its seconds per attempt.

One process imports everything once and forks the ranks of each attempt, with the environment that the agent gives them.
A case is a function ``f(attempt, rank, **arguments)`` of a module; what it returns, or what it raises, comes back.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

_TIMEOUT = 90.0
"""Seconds for one attempt."""


def run_attempts(attempts: list[dict[str, Any]]) -> list[list[Any]]:
    """For each attempt, one after the other, what each rank returned: ``["returned", value]``, ``["raised", class,
    text]`` or ``["died", status]``. A case that raises SystemExit returns None, and its process ends as scripts do.

    attempts: their ``case`` (``module:function``), ``ranks``, ``arguments``, and an ``environment`` beside RANK and
    WORLD_SIZE, with the address of a store.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(attempts), env=environment, capture_output=True, text=True,
        timeout=_TIMEOUT * len(attempts), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _serve(attempts: list[dict[str, Any]]) -> None:
    """Run the attempts; ``warm()`` of their modules first, which loads what is loaded on first use."""
    cases = {attempt["case"]: _case(attempt["case"]) for attempt in attempts}
    for module in {attempt["case"].split(":")[0] for attempt in attempts}:
        import_module(module).warm()
    for number, attempt in enumerate(attempts):
        print(json.dumps(_attempt(number, attempt, cases[attempt["case"]])), flush=True)


def _case(name: str) -> Any:
    module, function = name.split(":")
    return getattr(import_module(module), function)


def _attempt(number: int, attempt: dict[str, Any], case: Any) -> list[Any]:
    ranks = [_fork(number, rank, attempt, case) for rank in range(attempt["ranks"])]
    deadline = time.monotonic() + _TIMEOUT
    answers: list[Any] = []
    for pid, pipe in ranks:
        text = _read(pipe, deadline)
        if not text:
            os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
        answers.append(json.loads(text) if text and not status else ["died", status])
    return answers


def _read(pipe: int, deadline: float) -> str:
    """All that a rank writes, or "" if it dies or takes too long."""
    text = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0] and (more := os.read(pipe, 1 << 16)):
        text += more
    os.close(pipe)
    return text.decode()


def _fork(number: int, rank: int, attempt: dict[str, Any], case: Any) -> tuple[int, int]:
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, reading
    ranks = attempt["ranks"]
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    os.environ |= {name: str(value) for name, value in attempt["environment"].items()}
    try:
        answer = ["returned", case(number, rank, **attempt["arguments"])]
    except SystemExit:
        os.write(writing, json.dumps(["returned", None]).encode())
        raise
    except Exception as error:
        answer = ["raised", type(error).__name__, str(error), traceback.format_exc()]
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(json.load(sys.stdin))
