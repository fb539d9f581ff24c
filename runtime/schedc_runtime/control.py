"""What ranks tell each other beside the messages of the program: agreements, failures, and where each one stands.

Everything is JSON in the store that the processes met at (no pickle). A failure is looked for whenever a rank waits
here, so that all report its cause and not its echo, "connection closed by peer".
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault

_SLICE = 5.0
"""Seconds between two looks for a failed peer while waiting for an answer: the store warns whenever one ends. Who fails
answers the next round with `_LOST`, which wakes the others at once; the looks are for those who wait for a third."""
_FAILED = "failed"
_LOST = "null lost"
"""What a rank that has failed answers: no JSON."""


class PeerFailure(RuntimeFault):
    """Another rank failed, which stopped this one. rank: its name; the message holds that rank's own error."""

    def __init__(self, rank: str, text: str) -> None:
        self.rank = rank
        super().__init__(f"{rank} failed, and with it the step:\n{text}")


class StepTimeout(RuntimeFault):
    """A rank waited too long. The message names what every rank waits on, or where it was last seen."""


class Failure(NamedTuple):
    """One rank's report. rank: its name. cause: whether it failed by itself, rather than by waiting for others."""

    rank: str
    cause: bool
    text: str


def told_by(failure: Failure) -> RuntimeFault:
    """What another rank's report means here."""
    if failure.cause:
        return PeerFailure(failure.rank, failure.text)
    return StepTimeout(f"{failure.rank} gave up before:\n{failure.text}")


class Control:
    """One rank's end. ``position()`` says where the rank stands; a thread publishes it every ``interval`` seconds.

    store: a torch.distributed Store (its type stub lacks half of its methods), or None for a pipeline in one process,
        where there is nobody to tell.
    process: which of all this is. names: of all of them, as errors call them (`Mesh.names`).
    timeout: seconds that `gather` waits for the slowest rank.
    """

    def __init__(
        self, store: Any, process: int, names: Sequence[str], timeout: float, position: Callable[[], str]
    ) -> None:
        self.process, self.names, self.timeout = process, names, timeout
        self._store = store
        self._round = 0
        self._interval = min(1.0, timeout / 5)
        self._stop = threading.Event()
        self._read: deque[str] = deque()
        if store is not None:
            store.set_timeout(timedelta(seconds=min(_SLICE, timeout / 2)))
            arguments = (store.clone(), process, self._interval, _weakly(position), self._read, self._stop)
            threading.Thread(target=_watch, args=arguments, daemon=True, name="schedc-watchdog").start()
        weakref.finalize(self, self._stop.set)

    @property
    def name(self) -> str:
        """Of this process."""
        return self.names[self.process]

    def gather(self, what: str, value: Any) -> list[Any]:
        """The ``value`` (JSON) of every process, in order. ``what`` names the occasion in errors.

        Raises `PeerFailure` if a rank failed instead of coming here, `StepTimeout` if one did not come in time.
        """
        if self._store is None:
            return [value]
        self._round += 1
        prefix = f"round/{self._round}/"
        keys = [f"{prefix}{process}" for process in range(len(self.names))]
        self._store.set(keys[self.process], json.dumps(value))
        answers = self._wait_all(keys, what)
        if self._round > 1:
            # Everyone is in this round, hence has read the one before. The watchdog deletes it, off the step's path.
            self._read.append(f"round/{self._round - 1}/{self.process}")
        if _LOST.encode() in answers:
            lost = self.names[answers.index(_LOST.encode())]
            raise told_by(self.failure(wait=1.0) or Failure(lost, True, "it has not said why"))
        return [json.loads(answer) for answer in answers]

    def publish_failure(self, cause: bool, text: str) -> None:
        """Tell the others that this rank has failed."""
        if self._store is not None:
            failure = Failure(self.name, cause, text)
            self._store.append(_FAILED, json.dumps(failure) + "\n")
            self._store.set(f"round/{self._round + 1}/{self.process}", _LOST)

    def failure(self, wait: float = 0.0) -> Failure | None:
        """The first cause that any rank has published, within ``wait`` seconds; else another rank's report, if any."""
        deadline = time.monotonic() + wait
        failures: list[Failure] = []
        while self._store is not None:
            if self._store.check([_FAILED]):
                lines = self._store.get(_FAILED).decode().splitlines()
                failures = [Failure(*json.loads(line)) for line in lines]
                if causes := [failure for failure in failures if failure.cause]:
                    return causes[0]
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return next((failure for failure in failures if failure.rank != self.name), None)

    def positions(self) -> str:
        """A line per rank: where it stands, or that it no longer reports and where it was last seen.

        Takes two looks at each rank's reports, far enough apart that a live rank has reported again in between.
        """
        if self._store is None:
            return ""
        before = self._reports()
        time.sleep(2.5 * self._interval)
        lines = []
        for name, old, new in zip(self.names, before, self._reports(), strict=True):
            if new is None:
                lines.append(f"  {name} has never reported: its process died early or is stopped")
            elif old is not None and old["count"] == new["count"] and name != self.name:
                lines.append(f"  {name} no longer reports: dead or stopped; last seen at {new['at']}")
            else:
                lines.append(f"  {name} is at {new['at']}")
        return "\n".join(lines)

    def close(self) -> None:
        """Stop publishing the position."""
        self._stop.set()

    def _reports(self) -> list[dict[str, Any] | None]:
        assert self._store is not None
        keys = [f"position/{process}" for process in range(len(self.names))]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def _wait_all(self, keys: list[str], what: str) -> list[bytes]:
        assert self._store is not None
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                if self._store.has_extended_api():
                    return list(self._store.multi_get(keys))
                return [self._store.get(key) for key in keys]
            except dist.DistStoreError:
                if (failure := self.failure()) is not None:
                    raise told_by(failure) from None
                if time.monotonic() > deadline:
                    waited = zip(self.names, keys, strict=True)
                    missing = ", ".join(name for name, key in waited if not self._store.check([key]))
                    raise StepTimeout(
                        f"{missing} did not come to {what} within {self.timeout:g} s\n{self.positions()}"
                    ) from None


def _weakly(position: Callable[[], str]) -> Callable[[], str | None]:
    """``position`` (a bound method) without keeping its object alive, which a thread would do for ever."""
    reference = weakref.WeakMethod(position)

    def call() -> str | None:
        method = reference()
        return None if method is None else method()

    return call


def _watch(
    store: Any,
    process: int,
    interval: float,
    position: Callable[[], str | None],
    read: deque[str],
    stop: threading.Event,
) -> None:
    """The watchdog: publishes where the rank stands, also while its main thread is stuck in Python or in a wait.

    Deletes the answers of rounds that all ranks have ``read``, so that the store does not grow.
    """
    for number in count():
        if (at := position()) is None:
            return
        try:
            store.set(f"position/{process}", json.dumps({"count": number, "at": at}))
            while read:
                store.delete_key(read.popleft())
        except (dist.DistError, RuntimeError):
            return  # the store is gone: the process that holds it has ended, and with it the run
        if stop.wait(interval):
            return
