"""What ranks tell each other beside the messages of the program: agreements, failures, and what a failure means.

Everything is JSON in the store that the processes met at (no pickle). A failure is looked for whenever a rank waits
here, so that all report its cause and not its echo, "connection closed by peer".
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
from schedc_runtime.ranks.presence import Presence
from schedc_runtime.ranks.progress import Position

_SLICE = 5.0
"""Seconds between two looks for a failed peer while waiting for an answer: the store warns whenever one ends. Who fails
answers the next round with `_LOST`, which wakes the others at once; the looks are for those who wait for a third."""
_CAUSE = 1.0
"""Seconds within which the rank that broke a connection says why, or is seen to be dead."""
_REPORT = 2.0
"""Seconds for the one rank that reports, beside those that its looks at other machines take."""
_LOST = "null lost"
"""What a rank that has failed answers: no JSON."""
_Answer = TypeVar("_Answer")


class FailureKind(StrEnum):
    """What stopped a step, the likeliest cause first: an error of a rank, a rank or connection lost, a long wait."""

    ERROR = "error"
    PEER = "peer"
    TIMEOUT = "timeout"


_LIKELIEST = list(FailureKind)


class RankFailure(NamedTuple):
    """One report in the store. rank: who failed. reporter: who says so, and lists where everyone stands."""

    kind: FailureKind
    rank: str
    reporter: str
    text: str


def as_error(failure: RankFailure, name: str) -> RuntimeFault:
    """What another rank's report means to rank ``name``; of a connection that broke, the other end is its peer."""
    if failure.kind is FailureKind.ERROR:
        return PeerFailure(failure.rank, f"{failure.rank} failed, and with it the step:\n{failure.text}")
    text = f"{failure.text}\nthe error of {failure.reporter} lists where every rank stood"
    rank = failure.reporter if failure.rank == name else failure.rank
    return PeerFailure(rank, text) if failure.kind is FailureKind.PEER else StepTimeout(text)


class ControlPlane:
    """One rank's end.

    store: a torch.distributed Store (its type stub lacks half of its methods) for this pipeline alone, or None for a
        pipeline in one process, where there is nobody to tell.
    process: which of all this is. names: of all of them, as errors call them (`Mesh.names`).
    timeout: seconds that `gather` waits for the slowest rank. describe: a rank's position in words.
    """

    def __init__(
        self, store: Any, process: int, names: Sequence[str], timeout: float, describe: Callable[[Position], str]
    ) -> None:
        self.process, self.names, self.timeout = process, names, timeout
        # A connection of its own: the limit set here is not for others that use the store.
        self._store: Any = store.clone() if store is not None else None
        self._round = 0
        self._interval = min(1.0, timeout / 5)
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=min(_SLICE, timeout / 2)))
        self.presence = Presence(self._store, process, names, self._interval, describe)

    @property
    def name(self) -> str:
        """Of this process."""
        return self.names[self.process]

    def meet(self) -> None:
        """Learn which processes take part. A collective; until then nobody can be said to be dead."""
        if self._store is not None:
            self.presence.meet(self.gather("building the pipeline", self.presence.introduction()))

    def gather(self, what: str, value: Any) -> list[Any]:
        """The ``value`` (JSON) of every process, in order. ``what`` names the occasion in errors.

        Raises `PeerFailure` if a rank failed or died instead of coming here, `StepTimeout` if one did not come in time.
        """
        if self._store is None:
            return [value]
        self._round += 1
        keys = [f"round/{self._round}/{process}" for process in range(len(self.names))]
        try:
            self._store.set(keys[self.process], json.dumps(value))
            answers = self._wait_all(keys, what)
        except dist.DistError as error:
            view = f"{self.name} lost the store that all ranks meet at, waiting for {what}: {error}"
            raise self.diagnose(view, broken=True) from None
        if self._round > 1:
            # Everyone is in this round, hence has read the one before.
            self.presence.read.append(f"round/{self._round - 1}/{self.process}")
        if _LOST.encode() in answers:
            lost = self.names[answers.index(_LOST.encode())]
            failure = self._failure(wait=_CAUSE) or RankFailure(FailureKind.ERROR, lost, lost, "it has not said why")
            raise as_error(failure, self.name)
        return [json.loads(answer) for answer in answers]

    def publish(self, text: str) -> None:
        """Tell the others that this rank has failed by itself."""
        self._tell(RankFailure(FailureKind.ERROR, self.name, self.name, text))

    def leave(self) -> None:
        """Wake the ranks that wait for this one's next answer: it will not come."""
        self._ask(lambda store: store.set(f"round/{self._round + 1}/{self.process}", _LOST), None)

    def diagnose(self, view: str, *, broken: bool, peer: str = "") -> RuntimeFault:
        """What a failed wait of this rank means: another rank's failure if there is one, else what can be seen here.

        view: where this rank stood, and the error. broken: a connection broke, rather than a wait that took too long;
            peer: with whom, if it is known.

        If several ranks come here, one of them looks at all ranks and reports in its error; the others refer to it.
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
        """The likeliest cause that any rank has published, the first of its kind.

        Waits for one up to ``wait`` seconds; not ``even_if_dead``, only until a rank is seen to be dead.
        """
        deadline = time.monotonic() + wait
        while True:
            # Before the look into the store: who is dead has said what it had to say.
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
        """What the store answers; ``otherwise`` if there is none, or none any more."""
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
    """All failures in the store, in the order in which they were told."""
    keys = [f"failure/{number}" for number in range(1, store.add("failures", 0) + 1)]
    texts = [store.get(key) for key in keys if store.check([key])]
    return [RankFailure(FailureKind(kind), *rest) for kind, *rest in map(json.loads, texts)]
