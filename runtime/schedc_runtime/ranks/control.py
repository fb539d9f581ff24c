"""Exchanges values beside the messages of the program: agreements and failures, and what a failure means.

All values are JSON in the store of the processes (no pickle). Ranks meet in rounds. In each they add to one counter,
and those with something to tell append a text. The rank that comes last reads the texts and publishes one answer, for
which the others wait. A rank that waits here looks for failures of others, so that all ranks report the cause and not
its echo, "connection closed by peer".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from schedc_runtime.errors import PeerFailure, RanksDisagree, RuntimeFault, StepTimeout
from schedc_runtime.ranks.attendance import MOST, Alike, attendance, counter_share
from schedc_runtime.ranks.last_words import speak_at_the_end
from schedc_runtime.ranks.presence import LOST, Presence, answer_key
from schedc_runtime.ranks.progress import Position
from schedc_runtime.ranks.standing import Standing

_SLICE = 5.0
"""Seconds between two looks for a failed peer while waiting for an answer; the store prints a warning after each. A
failed rank answers the next round with `LOST`, which wakes the others at once. The looks serve ranks that wait for a
third rank."""
_LONG = 1 << 16
"""Bytes of texts of earlier rounds from which on texts go into another list."""
_CAUSE = 1.0
"""Seconds within which the rank that broke a connection publishes a reason, or is seen to be dead."""
_REPORT = 2.0
"""Seconds that the reporting rank may take, besides its looks at other machines."""
_Answer = TypeVar("_Answer")
Function = Callable[[list[Any]], Any]
"""fn([processes] what each has sent, None for a rank that sent nothing) -> JSON."""


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


class Unlike(Exception):
    """Ranks of a group brought different values. Every rank raises the same. details: [processes] as of `fold`."""

    def __init__(self, details: list[Any]) -> None:
        self.details = details
        super().__init__("values differ between ranks")


class _Lists(NamedTuple):
    """Where ranks count and tell: one counter and one list of texts for several rounds.

    number: which. total, length: of the counter and of the texts in bytes, at the end of the last round.
    """

    number: int = 0
    total: int = 0
    length: int = 0

    @property
    def counter(self) -> str:
        return f"count/{self.number}"

    @property
    def texts(self) -> str:
        return f"texts/{self.number}"


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
    timeout: seconds that a round waits for the slowest rank. describe: puts a rank's position into words.
    """

    def __init__(
        self, store: Any, process: int, names: Sequence[str], timeout: float, describe: Callable[[Position], str]
    ) -> None:
        self.process, self.names, self.timeout = process, names, timeout
        # Separate connections: the limit set here must not hold for other users of the store. It must not hold for
        # connecting either: torch asks for the peer's name there, and a slow name server takes seconds.
        self._store: Any = None if store is None else store.clone()
        self._reports: Any = None if store is None else store.clone()
        self._round, self._lists = 0, _Lists()
        self.waited = 0
        """Nanoseconds so far in which this rank waited for others to come to a round."""
        self.grace = 0.0
        """Seconds that a round waits longer: a rank whose device has stopped reports that itself."""
        self.on_look: Callable[[], object] = lambda: None
        """Called while this rank waits in a round, to show others where its device stands."""
        self.explain: Callable[[list[Standing], int], list[str]] = _unexplained
        """fn(where every rank stands, number of this one) -> lines about the rank for which all others wait."""
        self.everyone = tuple(range(len(names)))
        """The numbers of all processes."""
        self.interval = min(1.0, timeout / 5)
        """Seconds between two reports of a rank."""
        for connection in (self._store, self._reports):
            if connection is not None:
                connection.set_timeout(timedelta(seconds=min(_SLICE, timeout / 2)))
        self.presence = Presence(self._store, self._reports, process, names, self.interval, describe)

    @property
    def alone(self) -> bool:
        """Whether all ranks are in this process."""
        return self._store is None

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.process]

    def meet(self) -> None:
        """Learn which processes take part. A collective; before it no rank can be reported as dead."""
        if self._store is not None:
            self.presence.meet(self.gather("building the pipeline", self.presence.introduction()))
            speak_at_the_end(self)

    def agree(self, what: str, value: Any) -> list[Any] | None:
        """Compare the ``value`` (JSON) of all processes by checksums: None if all are equal, else [processes] values.

        what: the occasion, for errors. A collective, with the errors of `fold`.
        """
        try:
            self.fold(what, None, _nothing, alike=[Alike(value, self.everyone)], details=lambda: value)
        except Unlike as unlike:
            return unlike.details
        return None

    def gather(self, what: str, value: Any) -> list[Any]:
        """[processes] the ``value`` (JSON) of every process, in order, on every rank: for reports and rare occasions.

        Each rank reads what all have sent. `agree` and `fold` are for what happens at every step.
        """
        values: list[Any] = self.fold(what, [value], lambda told: [each[0] for each in told])
        return values

    def fold(
        self,
        what: str,
        value: Any,
        function: Function,
        *,
        alike: Iterable[Alike] = (),
        details: Callable[[], Any] = lambda: None,
        occasion: str = "",
    ) -> Any:
        """What ``function`` makes of the values (JSON) of all processes, in order. One rank calls ``function`` for all.

        value: None where this rank has nothing to tell, which spares a message. what: the occasion, for errors.
        alike: values that groups of ranks must have in common; ``details`` tells more about them where they differ.
        occasion: tells occasions apart that must not meet; ``what`` by default.

        Raises `PeerFailure` if a rank failed or died before it came here, or ``function`` failed on another rank.
        Raises `StepTimeout` if a rank did not come in time. Raises, on every rank alike, `Unlike` where values of a
        group differ, and `RanksDisagree` where ranks came for different occasions.
        """
        if self._store is None:
            return function([value])
        occasion = occasion or what
        groups = [Alike(occasion, self.everyone), *alike]
        equal, result = self._meet(what, None if value is None else json.dumps(value), groups, function)
        if equal:
            return result
        _, everyone = self._meet(what, json.dumps([occasion, what, details()]), (), lambda told: told)
        _check_occasions(self.names, everyone)
        raise Unlike([each[2] for each in everyone])

    def _meet(self, what: str, text: str | None, alike: Iterable[Alike], function: Function) -> tuple[bool, Any]:
        """A round of all ranks: whether values agree, and the result if they do. text: what this rank tells."""
        ranks, number = len(self.names), self._round + 1
        mine = counter_share(self.process, ranks, number, alike, text is not None)
        self._round = self.presence.awaited = number
        self.presence.progress.come(number, waits=True)
        try:
            if text is not None:
                self._store.append(self._lists.texts, f"{self.process} {text}\n")
            total = self._store.add(self._lists.counter, mine)
            if attendance(total - self._lists.total, ranks).come == ranks:
                answer = self._answer(total, function)
            else:
                begin = time.perf_counter_ns()
                answer = self._wait(what)
                self.waited += time.perf_counter_ns() - begin
        except dist.DistError as error:
            view = f"{self.name} lost the store that all ranks meet at, waiting for {what}: {error}"
            raise self.diagnose(view, broken=True) from None
        if answer.startswith(LOST):
            lost = self.names[int(answer.removeprefix(LOST))]
            if (failure := self._failure(wait=_CAUSE)) is not None:
                raise as_error(failure, self.name)
            raise self.diagnose(f"{self.name} waited for {lost} at {what}", broken=True, peer=lost)
        self.presence.progress.come(number, waits=False)
        lists, failed, equal, result = json.loads(answer)
        self._lists = _Lists(*lists)
        if failed is not None:
            name = self.names[failed[0]]
            raise PeerFailure(name, f"{name} failed at {what}, and with it all ranks:\n{failed[1]}")
        return equal, result

    def _answer(self, total: int, function: Function) -> str:
        """Publish the answer of a round to which this rank came last. total: of the counter."""
        lists = self._lists
        come = attendance(total - lists.total, len(self.names))
        told = self._store.get(lists.texts)[lists.length :] if come.telling else b""
        after = _Lists(lists.number, total, lists.length + len(told))
        if total > MOST or after.length > _LONG:
            after = _Lists(lists.number + 1)
            self.presence.read += [lists.counter, lists.texts]
        key = answer_key(self._round)
        try:
            result = function(_by_process(told, len(self.names))) if come.equal else None
            answer = json.dumps([after, None, come.equal, result])
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            self._lists = after
            self._store.compare_set(key, "", json.dumps([after, [self.process, cause], False, None]))
            raise
        if self._round > 1:
            # Every rank is in this round, hence has read the answer of the one before.
            self.presence.read.append(answer_key(self._round - 1))
        return str(self._store.compare_set(key, "", answer).decode())

    def _wait(self, what: str) -> str:
        """The answer of this round, which another rank will give."""
        key, deadline = answer_key(self._round), time.monotonic() + self.timeout + self.grace
        while True:
            if (dead := self.presence.ended()) and not self._store.check([key]):
                names = ", ".join(self.names[process] for process in dead)
                view = f"{self.name} waited for {names} at {what}"
                raise self.diagnose(view, broken=True, peer=self.names[dead[0]])
            try:
                return str(self._store.get(key).decode())
            except dist.DistStoreError:
                if (failure := self._failure(wait=0.0)) is not None:
                    raise as_error(failure, self.name) from None
                self.on_look()
                if time.monotonic() > deadline and (late := self.presence.late(key)):
                    names = ", ".join(self.names[process] for process in late)
                    view = f"{names} did not come to {what} within {self.timeout:g} s"
                    raise self.diagnose(view, broken=False) from None

    def look(self) -> None:
        """Raise what has stopped another rank, if anything has; for a rank that waits for its own device."""
        if (failure := self._failure(wait=0.0)) is not None:
            raise as_error(failure, self.name)
        if dead := self.presence.ended():
            lost = self.names[dead[0]]
            raise self.diagnose(f"{self.name} waited for its device", broken=True, peer=lost)

    def publish(self, text: str) -> None:
        """Report a failure here to all other ranks."""
        self._tell(RankFailure(FailureKind.ERROR, self.name, self.name, text))

    def leave(self) -> None:
        """Wake the ranks that wait for the next answer of this rank, which will not come."""
        self._ask(lambda store: store.compare_set(answer_key(self._round + 1), "", f"{LOST}{self.process}"), None)

    def diagnose(self, view: str, *, broken: bool, peer: str = "", help: str = "") -> RuntimeFault:
        """The error for a failed wait of this rank: another rank's failure if known, else the view of this rank.

        view: where this rank stood, and the error. broken: a connection broke; otherwise a wait took too long. peer:
        name of the other end, if known. help: what to do about a long wait.

        If several ranks call this, one of them looks at all ranks and reports in its error. The others refer to it.
        """
        if (failure := self._failure(wait=_CAUSE if broken else 0.0)) is not None:
            return as_error(failure, self.name)
        first = self._ask(lambda store: store.add("reporters", 1) == 1, True)
        if not first and (failure := self._failure(wait=_REPORT + 3 * self.interval, even_if_dead=True)) is not None:
            return as_error(failure, self.name)
        gone, standings = self.presence.ended(), self.presence.standings() if self._store is not None else []
        told = self.presence.troubles()
        if gone or not broken:  # a connection that broke is the cause itself
            told = [*told, *self.explain(standings, self.process)]
        text = "\n".join(told) or view
        if gone:
            failure = RankFailure(FailureKind.PEER, self.names[gone[0]], self.name, text)
        elif broken:
            failure = RankFailure(FailureKind.PEER, peer, self.name, text)
        else:
            failure = RankFailure(FailureKind.TIMEOUT, "", self.name, text)
        self._tell(failure)
        lines = [f"  {standing.line}" for standing in standings]
        whole = "\n".join([*told, view, "where every rank stands:", *lines])
        return PeerFailure(failure.rank, whole) if failure.kind is FailureKind.PEER else StepTimeout(whole, help)

    def last_words(self) -> str:
        """One line for SIGTERM: ranks of this machine that are lost, or else a report of a failure; then this rank."""
        known = self.presence.troubles()
        with suppress(dist.DistError):
            known = known or [failure.text for failure in _published(self._reports)[:1]]
        own = f"{self.name} was ended by SIGTERM; it was {self.presence.place()}"
        return "; ".join(" ".join(text.split()) for text in [*known, own])

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


def _unexplained(_standings: list[Standing], _process: int) -> list[str]:
    """Before the pipeline's programs are known."""
    return []


def _nothing(told: list[Any]) -> None:
    """The result of a round in which ranks only meet."""


def _by_process(told: bytes, ranks: int) -> list[Any]:
    """[ranks] the texts of a round, as values; None for a rank that sent nothing."""
    values: list[Any] = [None] * ranks
    for line in told.decode().splitlines():
        process, _, text = line.partition(" ")
        values[int(process)] = json.loads(text)
    return values


def _check_occasions(names: Sequence[str], everyone: Sequence[Any]) -> None:
    """Raise `RanksDisagree` where ranks met for different occasions. everyone: [processes] occasion, its name, ..."""
    for name, (occasion, what, _) in zip(names, everyone, strict=True):
        if occasion != everyone[0][0]:
            raise RanksDisagree(
                f"{names[0]} is at {everyone[0][1]}, {name} at {what}",
                "call step, evaluate, clip_grad_norm_ and all that ranks do together in the same order on every rank",
            )


def _published(store: Any) -> list[RankFailure]:
    """All failures in the store, in the order of publication."""
    keys = [f"failure/{number}" for number in range(1, store.add("failures", 0) + 1)]
    texts = [store.get(key) for key in keys if store.check([key])]
    return [RankFailure(FailureKind(kind), *rest) for kind, *rest in map(json.loads, texts)]
