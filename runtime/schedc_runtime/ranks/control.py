"""Exchanges values beside the messages of the program: agreements and failures, and what a failure means.

All values are JSON in the store of the processes (no pickle). A rank that waits here looks for failures of others, so
that all ranks report the cause and not its echo, "connection closed by peer".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from schedc_runtime.errors import PeerFailure, RuntimeFault, StepTimeout
from schedc_runtime.ranks.presence import LOST, Presence
from schedc_runtime.ranks.progress import Position

_SLICE = 5.0
"""Seconds between two looks for a failed peer while waiting for an answer; the store prints a warning after each. A
failed rank answers the next round with `LOST`, which wakes the others at once. The looks serve ranks that wait for a
third rank."""
_CAUSE = 1.0
"""Seconds within which the rank that broke a connection publishes a reason, or is seen to be dead."""
_REPORT = 2.0
"""Seconds that the reporting rank may take, besides its looks at other machines."""
_Answer = TypeVar("_Answer")


class FailureKind(StrEnum):
    """What stopped a step, the likeliest cause first: an error of a rank, a lost rank or connection, a long wait."""

    ERROR = "error"
    PEER = "peer"
    TIMEOUT = "timeout"


_LIKELIEST = list(FailureKind)


class RankFailure(NamedTuple):
    """One report in the store.

    rank: name of the failed rank. reporter: name of the rank that reports, and lists where every rank stands.
    """

    kind: FailureKind
    rank: str
    reporter: str
    text: str


def as_error(failure: RankFailure, name: str) -> RuntimeFault:
    """The error of rank ``name`` for another rank's report. For a broken connection it names the other end."""
    if failure.kind is FailureKind.ERROR:
        return PeerFailure(failure.rank, f"{failure.rank} failed, and with it the step:\n{failure.text}")
    text = f"{failure.text}\nthe error of {failure.reporter} lists where every rank stood"
    rank = failure.reporter if failure.rank == name else failure.rank
    return PeerFailure(rank, text) if failure.kind is FailureKind.PEER else StepTimeout(text)


class ControlPlane:
    """One rank's end of the control plane.

    store: a torch.distributed Store for this pipeline alone (its type stub lacks half of its methods); None for a
        pipeline in one process.
    process: number of this process. names: names of all processes in errors (`Mesh.names`).
    timeout: seconds that `gather` waits for the slowest rank. describe: puts a rank's position into words.
    """

    def __init__(
        self, store: Any, process: int, names: Sequence[str], timeout: float, describe: Callable[[Position], str]
    ) -> None:
        self.process, self.names, self.timeout = process, names, timeout
        # Separate connections: the limit set here must not hold for other users of the store. It must not hold for
        # connecting either: torch asks for the peer's name there, and a slow name server takes seconds.
        self._store: Any = None if store is None else store.clone()
        reports: Any = None if store is None else store.clone()
        self._round = 0
        self._interval = min(1.0, timeout / 5)
        for connection in (self._store, reports):
            if connection is not None:
                connection.set_timeout(timedelta(seconds=min(_SLICE, timeout / 2)))
        self.presence = Presence(self._store, reports, process, names, self._interval, describe)

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.process]

    def meet(self) -> None:
        """Learn which processes take part. A collective; before it no rank can be reported as dead."""
        if self._store is not None:
            self.presence.meet(self.gather("building the pipeline", self.presence.introduction()))

    def gather(self, what: str, value: Any) -> list[Any]:
        """[processes] the ``value`` (JSON) of every process, in order. what: the occasion, for errors.

        Raises `PeerFailure` if a rank failed or died before it came here, and `StepTimeout` if a rank did not come in
        time.
        """
        if self._store is None:
            return [value]
        self._round += 1
        self.presence.awaited = self._round
        keys = [f"round/{self._round}/{process}" for process in range(len(self.names))]
        try:
            self._store.set(keys[self.process], json.dumps(value))
            self._refuse_dead(keys, what)
            answers = self._wait_all(keys, what)
        except dist.DistError as error:
            view = f"{self.name} lost the store that all ranks meet at, waiting for {what}: {error}"
            raise self.diagnose(view, broken=True) from None
        if self._round > 1:
            # Every rank is in this round, hence has read the one before.
            self.presence.read.append(f"round/{self._round - 1}/{self.process}")
        if LOST.encode() in answers:
            lost = self.names[answers.index(LOST.encode())]
            if (failure := self._failure(wait=_CAUSE)) is not None:
                raise as_error(failure, self.name)
            raise self.diagnose(f"{self.name} waited for {lost} at {what}", broken=True, peer=lost)
        return [json.loads(answer) for answer in answers]

    def _refuse_dead(self, keys: Sequence[str], what: str) -> None:
        """Raise `PeerFailure` for a rank of this machine that has ended without its answer."""
        late = [process for process in self.presence.ended() if not self._store.check([keys[process]])]
        if late:
            names = ", ".join(self.names[process] for process in late)
            view = f"{self.name} waited for {names} at {what}"
            raise self.diagnose(view, broken=True, peer=self.names[late[0]])

    def publish(self, text: str) -> None:
        """Tell the others that this rank failed by itself."""
        self._tell(RankFailure(FailureKind.ERROR, self.name, self.name, text))

    def leave(self) -> None:
        """Wake the ranks that wait for the next answer of this rank, which will not come."""
        self._ask(lambda store: store.set(f"round/{self._round + 1}/{self.process}", LOST), None)

    def diagnose(self, view: str, *, broken: bool, peer: str = "") -> RuntimeFault:
        """The error for a failed wait of this rank: another rank's failure if there is one, else what this rank sees.

        view: where this rank stood, and the error. broken: a connection broke; otherwise a wait took too long. peer:
        name of the other end, if known.

        If several ranks call this, one of them looks at all ranks and reports in its error. The others refer to it.
        """
        if (failure := self._failure(wait=_CAUSE if broken else 0.0)) is not None:
            return as_error(failure, self.name)
        first = self._ask(lambda store: store.add("reporters", 1) == 1, True)
        if not first and (failure := self._failure(wait=_REPORT + 3 * self._interval, even_if_dead=True)) is not None:
            return as_error(failure, self.name)
        gone = self.presence.ended()
        troubles = self.presence.troubles()
        text = "\n".join(troubles) or view
        if gone:
            failure = RankFailure(FailureKind.PEER, self.names[gone[0]], self.name, text)
        elif broken:
            failure = RankFailure(FailureKind.PEER, peer, self.name, text)
        else:
            failure = RankFailure(FailureKind.TIMEOUT, "", self.name, text)
        lines = [f"  {line}" for line in self.presence.lines()] if self._store is not None else []
        self._tell(failure)
        whole = "\n".join([*troubles, view, "where every rank stands:", *lines])
        return PeerFailure(failure.rank, whole) if failure.kind is FailureKind.PEER else StepTimeout(whole)

    def close(self) -> None:
        """Stop reporting where this rank stands."""
        self.presence.close()

    def _failure(self, wait: float, *, even_if_dead: bool = False) -> RankFailure | None:
        """The likeliest cause that any rank has published, the first of its kind; None if there is none.

        Waits up to ``wait`` seconds. Without ``even_if_dead`` it stops waiting when a rank is seen to be dead.
        """
        deadline = time.monotonic() + wait
        while True:
            # Before the look into the store: a dead rank has published all that it will.
            gone = not even_if_dead and bool(self.presence.ended())
            nothing: list[RankFailure] = []
            if failures := self._ask(_published, nothing):
                return min(failures, key=lambda failure: _LIKELIEST.index(failure.kind))
            if gone or time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def _tell(self, failure: RankFailure) -> None:
        def tell(store: Any) -> None:
            store.set(f"failure/{store.add('failures', 1)}", json.dumps(failure))

        self._ask(tell, None)

    def _ask(self, ask: Callable[[Any], _Answer], otherwise: _Answer) -> _Answer:
        """The answer of the store; ``otherwise`` if there is no store, or no longer one."""
        try:
            return otherwise if self._store is None else ask(self._store)
        except dist.DistError:
            return otherwise

    def _wait_all(self, keys: list[str], what: str) -> list[bytes]:
        assert self._store is not None
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                if self._store.has_extended_api():
                    return list(self._store.multi_get(keys))
                return [self._store.get(key) for key in keys]
            except dist.DistStoreError:
                late = [process for process, key in enumerate(keys) if not self._store.check([key])]
                if (failure := self._failure(wait=0.0)) is not None:
                    raise as_error(failure, self.name) from None
                names = ", ".join(self.names[process] for process in late)
                if set(late) & set(self.presence.ended()):
                    raise self.diagnose(f"{self.name} waited for {names} at {what}", broken=True) from None
                if time.monotonic() > deadline:
                    view = f"{names} did not come to {what} within {self.timeout:g} s"
                    raise self.diagnose(view, broken=False) from None


def _published(store: Any) -> list[RankFailure]:
    """All failures in the store, in the order of publication."""
    keys = [f"failure/{number}" for number in range(1, store.add("failures", 0) + 1)]
    texts = [store.get(key) for key in keys if store.check([key])]
    return [RankFailure(FailureKind(kind), *rest) for kind, *rest in map(json.loads, texts)]
