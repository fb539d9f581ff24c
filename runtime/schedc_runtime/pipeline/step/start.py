"""The start of a call: what all ranks bring is compared by checksums, and exchanged only where it is new.

A rank with the request of an earlier call expects the other ranks' requests of that call. All ranks say by a number
which exchange they refer to. Where these numbers or the options of the call differ, all ranks exchange their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from schedc_runtime.partition.example import CONTEXT
from schedc_runtime.pipeline.agree.batch import Agreement, StepRequest, count_of, total_of
from schedc_runtime.pipeline.agree.contents import ORDERS, GivenBatches
from schedc_runtime.ranks.attendance import Alike
from schedc_runtime.ranks.control import ControlPlane, Unlike

_repeated = itemgetter(
    *(at for at, name in enumerate(StepRequest._fields) if name not in ("call", "counted", "lacking"))
)
"""The fields of a request that say whether it was made before."""
_MOST = 256
"""Exchanges to remember. A rank that has forgotten one begins the next."""


class Known(NamedTuple):
    """What followed from an exchange. number: which. snapshots: [processes] as of `StepRequest`.

    members: by ``batch`` and ``targets``, the processes of this replica that were given them. loaded: whether a state
    was loaded on any rank.
    """

    number: int
    agreement: Agreement
    snapshots: list[Any]
    members: dict[str, tuple[int, ...]]
    loaded: bool


class CallStart:
    """The starts of all calls of one pipeline. counting: number of processes that count targets.

    batches: those of this process.
    """

    def __init__(self, control: ControlPlane, counting: int, batches: GivenBatches) -> None:
        self._control, self._counting, self._batches = control, counting, batches
        self._exchanges = 0
        self._known: dict[str, Known] = {}
        self.lacking = 0
        """Before a call: `StepRequest.lacking` of this rank. After its start: the largest of any rank."""
        self.then: Callable[[int], object] = lambda _: None
        """Called with the largest `lacking` of all ranks when they have agreed on a call."""

    def agree(
        self,
        what: str,
        request: StepRequest,
        counted: bool | None,
        check: Callable[[Sequence[StepRequest]], Agreement],
    ) -> Known:
        """What all ranks know of a call. A collective.

        what: the call, for errors. counted: as of `agree` in `schedc_runtime.pipeline.agree.batch`. check: makes an
        agreement of the requests of all ranks, or raises on every rank alike.
        """
        call = request.call
        if self.lacking:
            request = request._replace(lacking=self.lacking)
        own = repr((call["call"], call.get("microbatches"), counted, *_repeated(request)))
        known = self._known.get(own)
        given = [] if known is None or self._control.alone else self._batches.alike(known.members)
        total, requests = self._meet(what, request, -1 if known is None else known.number, given)
        if requests is not None:
            self._batches.forget()
            agreement = check(requests)
            if len(self._known) == _MOST:
                self._known.clear()
            snapshots, loaded = [each.snapshot for each in requests], any(each.loaded for each in requests)
            known = Known(self._exchanges, agreement, snapshots, self._members(requests, request.replica), loaded)
            self._known[own], total = known, agreement.total
        assert known is not None
        self._batches.agreed(known.members)
        self.then(self.lacking)
        if total == known.agreement.total:
            return known
        return known._replace(agreement=known.agreement._replace(total=total))

    def exchange(self, what: str, request: StepRequest) -> Sequence[StepRequest] | None:
        """The requests of all ranks for a call without a batch; None where all are equal. A collective."""
        return self._meet(what, request, 0, [])[1]

    def _meet(
        self, what: str, request: StepRequest, number: int, alike: Sequence[Alike]
    ) -> tuple[Any, Sequence[StepRequest] | None]:
        """The number of targets, and the requests of all ranks where they are new or ranks differ.

        number: that of the exchange to which this rank refers; -1 for a new request. alike: what else is compared.
        """
        control = self._control
        told = _told(request)
        if control.alone:
            self.lacking, total = request.lacking, self._total([told])[1]
            return total, [request] if number < 0 else None
        # Numbers of ranks tell new requests apart, so that they never agree.
        expected = [request.call, number if number >= 0 else f"new on {control.name}"]
        try:
            self.lacking, total = control.fold(
                what, told, self._total, alike=[Alike(expected, control.everyone), *alike],
                details=lambda: request._replace(given=self._batches.told()), occasion="a call",
            )  # fmt: skip
        except Unlike as unlike:
            self._exchanges += 1
            requests = [StepRequest(*each) for each in unlike.details]
            self.lacking = max(each.lacking for each in requests)
            return None, requests
        return total, None

    def _total(self, told: Sequence[Any]) -> tuple[int, float | None]:
        """The largest `lacking`, and the number of targets, from the `_told` of [processes]."""
        spoken = [each for each in told if each is not None]
        lacking = max((each[0] for each in spoken), default=0)
        return lacking, total_of((each[1] for each in spoken if each[1]), self._counting)

    def _members(self, requests: Sequence[StepRequest], replica: int) -> dict[str, tuple[int, ...]]:
        """By part of a batch, the processes that were given it: of a replica, or of those that share sequences."""
        context = self._batches.context
        near = [
            (process, each) for process, each in enumerate(requests) if each.replica // context == replica // context
        ]
        here = [(process, each) for process, each in near if each.replica == replica]
        return {
            "batch": tuple(process for process, each in here if each.batch is not None),
            "targets": tuple(process for process, each in here if each.targets is not None),
            CONTEXT: tuple(process for process, each in near if each.batch is not None),
            ORDERS: tuple(process for process, _ in here),
        }


def _told(request: StepRequest) -> tuple[int, tuple[int, float] | None] | None:
    """What a rank tells the others in any case; None for nothing, which spares a message."""
    count = count_of(request)
    return None if count is None and not request.lacking else (request.lacking, count)
