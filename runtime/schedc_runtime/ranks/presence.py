"""The other ranks and their states: where each stands, and whether it runs, is stopped or dead.

Ranks of this machine are looked up in /proc and by their pages in memory. Ranks of other machines report to the store.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from schedc_runtime.ranks.processes import (
    Condition,
    Process,
    has_ended,
    killed_for_memory,
    memory_events,
    process_condition,
    this_process,
)
from schedc_runtime.ranks.progress import PeerProgress, Position, Progress
from schedc_runtime.ranks.stacks import offer
from schedc_runtime.ranks.standing import Standing

LOST = "lost "
"""How the answer of a round begins in place of JSON if a rank has failed; then comes its number."""
_END = 2.0
"""Seconds to wait at the end of a pipeline for the thread that reports to the store."""


GIVING_UP = "giving up"
"""How the activity of a rank begins that has found a failure."""
_TOLD = 6
"""How many fields of a `Position` other machines read. The rest concerns the clock and the files of one machine."""
_Value = TypeVar("_Value")


def answer_key(number: int) -> str:
    """The key of a round's answer."""
    return f"round/{number}"


class _Peer(NamedTuple):
    """Another rank. process: None before `meet`. here: whether the process runs on this machine.

    page: if it can be read.
    """

    process: Process | None
    here: bool
    page: PeerProgress | None


class Presence:
    """All ranks of a pipeline, as seen by one rank.

    store: that of `ControlPlane`. reports: another connection to it, on which a thread reports every ``interval``
    seconds where this rank stands.
    process: number of this rank in ``names``. describe: puts a position into words.
    """

    def __init__(
        self,
        store: Any,
        reports: Any,
        process: int,
        names: Sequence[str],
        interval: float,
        describe: Callable[[Position], str],
    ) -> None:
        self.names, self.process = names, process
        self.progress = Progress(shared=store is not None)
        self.awaited = 0
        """Number of the last round of `ControlPlane` that this rank has begun."""
        self._memory: dict[int, tuple[Path | None, int]] = {}
        """By rank of this machine: where the kernel counts kills for want of memory, and their number at the start."""
        self.read: deque[str] = deque()
        """Keys of the store that all ranks have read. The thread deletes them outside of the step."""
        self._store, self._interval, self._describe = store, interval, describe
        self._me = this_process()
        self._stack = offer() if store is not None else -1
        self._peers = [_Peer(None, False, None) for _ in names]
        stop, threads = threading.Event(), []
        if store is not None:
            position = _weakly(self._news)
            watchdog = threading.Thread(
                target=_watch, args=(reports, process, interval, position, self.read, stop, _weakly(self._lost)),
                daemon=True, name="schedc-watchdog",
            )  # fmt: skip
            watchdog.start()
            threads.append(watchdog)
        # Also at the interpreter's exit: a thread that returns from the store afterwards aborts the process.
        self._end = weakref.finalize(self, _end, stop, threads, self.progress)

    def introduction(self) -> list[Any]:
        """The process and page of this rank, as JSON for the others."""
        return [*self._me, self.progress.descriptor]

    def meet(self, everyone: Sequence[Sequence[Any]]) -> None:
        """Take the `introduction` of every rank, in order of ranks."""
        self._peers = [self._peer(Process(*fields), descriptor) for *fields, descriptor in everyone]
        for number, peer in enumerate(self._peers):
            if peer.here and peer.process is not None:
                events = memory_events(peer.process)
                self._memory[number] = events, killed_for_memory(events)

    def ended(self) -> list[int]:
        """Numbers of the ranks whose processes have ended, those first that did not give up because of another."""
        ended = [
            number
            for number, peer in enumerate(self._peers)
            if number != self.process and peer.here and peer.process is not None and has_ended(peer.process)
        ]
        return sorted(ended, key=self._gave_up)

    def _gave_up(self, process: int) -> bool:
        """Whether a rank of this machine has found that the step has failed; its end is then no cause."""
        page = self._peers[process].page
        return page is not None and page.read().activity.startswith(GIVING_UP)

    def _lost(self) -> tuple[str, str] | None:
        """The key of the round that this rank is in, and its answer if a rank has ended."""
        ended = self.ended() if self.awaited else []
        return (answer_key(self.awaited), f"{LOST}{ended[0]}") if ended else None

    def late(self, key: str) -> list[int]:
        """Numbers of the ranks whose reports do not say that they have come to the round that this rank is in.

        It waits for a further report of each. Empty if the round has its answer by then. key: of the answer.
        """
        time.sleep(1.5 * self._interval)
        others = [process for process in range(len(self.names)) if process != self.process]
        reports = self._reports(others)
        late = [each for each in others if reports[each] is None or reports[each]["round"] < self.awaited]
        return [] if self._store.check([key]) else late or others

    def troubles(self) -> list[str]:
        """A line for each rank of this machine that is dead or stopped: how, and where it stood; causes first."""
        processes = sorted(range(len(self.names)), key=self._gave_up)
        conditions = sorted(((each, self._condition(each)) for each in processes), key=lambda pair: _is_ended(pair[1]))
        return [
            self._standing(process, state, None).line for process, state in conditions if state.ended or state.stopped
        ]

    def place(self) -> str:
        """Where this rank stands, in words."""
        return self._describe(self.progress.read())

    def standings(self) -> list[Standing]:
        """[ranks] where each stands, and what keeps it from running.

        For ranks of other machines this looks at their reports twice. A live rank reports in between.
        """
        away = [process for process, peer in enumerate(self._peers) if peer.page is None and process != self.process]
        before = self._reports(away)
        if away:
            time.sleep(2.5 * self._interval)
        after = self._reports(away)
        seen = {process: (before[process], after[process]) for process in away}
        return [self._standing(each, self._condition(each), seen.get(each)) for each in range(len(self.names))]

    def close(self) -> None:
        """Stop reporting. Other ranks then read that this rank is done."""
        self.progress.say("done: its pipeline is closed")
        self._end()

    def _peer(self, process: Process, descriptor: int) -> _Peer:
        here = bool(process.machine) and process.machine == self._me.machine
        if not here or descriptor < 0 or process == self._me:
            return _Peer(process, here, None)
        try:
            return _Peer(process, here, PeerProgress(process.pid, descriptor))
        except (OSError, ValueError):
            return _Peer(process, here, None)  # no permission; the reports in the store remain

    def _condition(self, process: int) -> Condition:
        peer = self._peers[process]
        if process == self.process or not peer.here or peer.process is None:
            return Condition(False, False, "")
        state = process_condition(peer.process)
        events, before = self._memory.get(process, (None, 0))
        if state.ended and state.why.endswith("SIGKILL") and killed_for_memory(events) > before:
            return state._replace(why=f"{state.why}, as the kernel does where memory runs out")
        return state

    def _standing(self, process: int, state: Condition, seen: tuple[Any, Any] | None) -> Standing:
        """What is known of a rank. seen: its last two reports, if no page of it can be read."""
        peer, who = self._peers[process], self.names[process]
        if peer.process is not None and state.why:
            who += f" (pid {peer.process.pid})"
        elif peer.process is not None and not peer.here and process != self.process:
            who += f" on {peer.process.host}"
        silent = False
        if process == self.process or peer.page is not None:
            position: Position | None = (self.progress if peer.page is None else peer.page).read()
            place = self._describe(position) if position else ""
            then = f"; it {'was' if state.ended else 'is'} {place}"
        else:
            old, new = seen or (None, None)
            place, position = (new["at"], Position(*new["position"])) if new else ("", None)
            then = f"; its last report was: {place}" if new else ""
            silent = seen is not None and not state.why and (new is None or new == old)
        if silent:
            line = f"{who} {'no longer reports: dead, stopped, or cut off' if place else 'has never reported'}{then}"
        else:
            line = f"{who} is {'dead: ' * state.ended}{state.why}{then}" if state.why else f"{who} is {place}"
        looked_up = peer.process if peer.here and process != self.process else None
        return Standing(self.names[process], line, place, state, position, looked_up, silent)

    def _news(self) -> dict[str, Any]:
        """What the others may read in the store: where this rank stands, and the last round it came to."""
        self.progress.beat(self._stack if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL else -1)
        position = self.progress.read()
        return {"at": self._describe(position), "round": self.awaited, "position": position[:_TOLD]}

    def _reports(self, processes: Sequence[int]) -> dict[int, Any]:
        """The newest report of each rank; None without a report, or if the store is gone."""
        reports: dict[int, Any] = dict.fromkeys(processes)
        try:
            for process in processes:
                if self._store.check([key := f"position/{process}"]):
                    reports[process] = json.loads(self._store.get(key))
        except RuntimeError:
            pass  # the store ended with the process that held it
        return reports


def _is_ended(state: Condition) -> bool:
    """Whether a launcher has ended a process, as it does with all that are left behind a failure."""
    return state.ended and state.why.endswith("SIGTERM")


def _end(stop: threading.Event, threads: list[threading.Thread], progress: Progress) -> None:
    stop.set()
    progress.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_END)


def _weakly(position: Callable[[], _Value]) -> Callable[[], _Value | None]:
    """A function that calls ``position``, a bound method, without keeping its object alive; None once that is gone."""
    reference = weakref.WeakMethod(position)

    def call() -> _Value | None:
        method = reference()
        return None if method is None else method()

    return call


def _watch(
    store: Any,
    process: int,
    interval: float,
    position: Callable[[], dict[str, Any] | None],
    read: deque[str],
    stop: threading.Event,
    lost: Callable[[], tuple[str, str] | None],
) -> None:
    """Run the watchdog: report where the rank stands, also while its main thread is stuck in Python or in a wait.

    It also deletes the keys that all ranks have ``read``, so that the store does not grow. It answers the round that a
    ``lost`` rank will not complete, which wakes the ranks that wait.
    """
    for number in count():
        if (place := position()) is None:
            return
        try:
            store.set(f"position/{process}", json.dumps({"count": number, **place}))
            while read:
                store.delete_key(read.popleft())
            if (answer := lost()) is not None:
                store.compare_set(answer[0], "", answer[1])  # only where the round has no answer yet
        except RuntimeError:
            return  # the store is gone with the process that held it
        if stop.wait(interval):
            return
