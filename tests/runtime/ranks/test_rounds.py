"""What ranks tell each other beside a program: compared, folded, and counted in reads and writes of the store."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from schedc_runtime.errors import PeerFailure, RanksDisagree, StepTimeout
from schedc_runtime.pipeline.agree.batch import Agreement, StepRequest, signature_of
from schedc_runtime.pipeline.agree.contents import GivenBatches
from schedc_runtime.pipeline.build.loss_function import Formed
from schedc_runtime.pipeline.step.losses import gathered
from schedc_runtime.pipeline.step.start import CallStart
from schedc_runtime.ranks.attendance import Alike, attendance, counter_share
from schedc_runtime.ranks.control import ControlPlane
from support.sweeps import halved


class CountingStore:
    """A store that counts each key that it reads, writes or deletes, but for the reports of positions."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self.store, self.counts = store, counts

    def clone(self) -> CountingStore:
        return CountingStore(self.store, self.counts)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            if name != "set_timeout" and not str(arguments[0]).startswith("position/"):
                self.counts[name] += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return method(*arguments)

        return call


Act = Callable[[ControlPlane], Any]


def on_ranks(ranks: int, act: Act, timeout: float = 20.0, counts: Counter[str] | None = None) -> list[Any]:
    """[ranks] what ``act`` gives or raises on each rank; a rank is a thread. counts: keys of the store, as counted."""
    counts = Counter() if counts is None else counts
    store, names = CountingStore(HashStore(), counts), [f"rank {rank}" for rank in range(ranks)]
    planes = [ControlPlane(store, rank, names, timeout, lambda position: position.activity) for rank in range(ranks)]

    def run(plane: ControlPlane) -> Any:
        try:
            return act(plane)
        except Exception as error:
            plane.leave()
            return error

    with ThreadPoolExecutor(ranks) as threads:
        outcomes = list(threads.map(run, planes))
    for plane in planes:
        plane.close()
        counts["delete_key"] += len(plane.presence.read)  # its thread's next deletions
    return outcomes


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("ranks", halved([8, 64]))
def test_a_plain_step_reads_and_writes_at_most_eight_keys_for_each_rank(ranks: int) -> None:
    """A call with its batch, the loss of the last rank, and the norm with gradients on all ranks: 21 steps of these."""

    def train(plane: ControlPlane) -> list[Any]:
        batches, tokens, results = GivenBatches(later=False), torch.arange(32).reshape(8, 4), []
        start = CallStart(plane, 1, batches)
        last = plane.process == ranks - 1
        for step in range(22):
            if step == 1 and plane.process == 0:
                first.update(counts)  # later steps expect the exchange of the first step
            call = {"call": "step", "steps": step}
            batches.begin(f"step {step}", tokens + step, tokens)
            request = StepRequest(signature_of(tokens), signature_of(tokens), plane.process == 0, last, call)
            start.agree(f"the start of step {step}", request, False, lambda requests: Agreement({}, None, None, True))
            formed = {0: Formed(torch.tensor(0.5), 1.0, {}, False)} if last else {}
            everyone, _ = gathered(plane, formed, ())
            norms = [False, [[f"weight {plane.process}", 0, 2.0]]]
            total = plane.fold("the norm", norms, lambda told: sum(x[1][0][2] for x in told))
            results.append([everyone[0]["formed"]["0"][0], total])
        return results

    counts, first = Counter[str](), Counter[str]()
    outcomes = on_ranks(ranks, train, counts=counts)
    assert outcomes == [[[0.5, 2.0 * ranks]] * 22] * ranks
    steady = (counts.total() - first.total()) / 21
    assert steady <= 8 * ranks, (counts - first, steady / ranks)
    assert counts["delete_key"] > 60, "answers are deleted once all have read them"


def test_equal_values_are_compared_and_others_are_read() -> None:
    def act(plane: ControlPlane) -> Any:
        return [plane.agree("one", ["same", 1]), plane.agree("two", plane.process // 3), plane.agree("three", 0)]

    assert on_ranks(4, act) == [[None, [0, 0, 0, 1], None]] * 4


def test_one_rank_folds_in_the_order_of_ranks_for_all() -> None:
    calls: list[Any] = []

    def function(told: list[Any]) -> list[Any]:
        calls.append(told)
        return [told, float("nan"), 0.1 + 0.2]

    def act(plane: ControlPlane) -> Any:
        time.sleep(0.01 * (3 - plane.process))  # the last rank comes first
        value = None if plane.process == 1 else {"of": plane.process}
        return repr(plane.fold("folding", value, function))

    expected = [[{"of": 0}, None, {"of": 2}], float("nan"), 0.1 + 0.2]
    assert on_ranks(3, act) == [repr(expected)] * 3
    assert calls == [expected[0]]


def test_a_failure_of_the_function_reaches_all_ranks() -> None:
    def act(plane: ControlPlane) -> Any:
        time.sleep(0.1 * (plane.process == 2))
        with pytest.raises((ZeroDivisionError, PeerFailure)) as caught:
            plane.fold("dividing", 1, lambda told: 1 / 0)
        return type(caught.value).__name__, str(caught.value), plane.gather("after it", plane.process)

    *others, own = on_ranks(3, act)
    assert own == ("ZeroDivisionError", "division by zero", [0, 1, 2])
    told = "rank 2 failed at dividing, and with it all ranks:\nZeroDivisionError: division by zero"
    assert others == [("PeerFailure", told, [0, 1, 2])] * 2


def test_ranks_that_come_for_other_reasons_are_named() -> None:
    def act(plane: ControlPlane) -> Any:
        what = "the norm of the gradients" if plane.process == 2 else "the start of step 3"
        with pytest.raises(RanksDisagree) as caught:
            plane.fold(what, 1, sum)
        return caught.value.message, plane.fold("then", 1, sum)

    told = "rank 0 is at the start of step 3, rank 2 at the norm of the gradients"
    assert on_ranks(4, act) == [(told, 4)] * 4


@pytest.mark.slow
def test_who_is_late_or_has_left_is_named() -> None:
    def late(plane: ControlPlane) -> Any:
        if plane.process in (1, 2):
            time.sleep(3.0)
            return None
        return plane.agree("a meeting", 1)

    first, *_, last = on_ranks(4, late, timeout=1.0)
    for error in (first, last):
        assert isinstance(error, StepTimeout)
    assert any(str(error).startswith("rank 1, rank 2 did not come to a meeting within 1 s") for error in (first, last))

    def leaving(plane: ControlPlane) -> Any:
        if plane.process == 1:
            plane.publish("ValueError: injected")
            raise ValueError
        return plane.agree("a meeting", 1)

    start = time.monotonic()
    errors = on_ranks(3, leaving, timeout=80.0)
    assert [str(errors[rank]) for rank in (0, 2)] == ["rank 1 failed, and with it the step:\nValueError: injected"] * 2
    assert time.monotonic() - start < 20, "nobody waits for the limit"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1024])
def test_checksums_of_equal_values_cancel_and_others_do_not(ranks: int) -> None:
    """Groups of four neighbours, and all ranks; any ranks of a group may bring another value."""
    rng = random.Random(ranks)
    everyone = tuple(range(ranks))
    groups = [everyone[low : low + 4] for low in range(0, ranks, 4)]

    def total(number: int, other: set[int]) -> int:
        amounts = (
            counter_share(rank, ranks, number, [Alike(f"of {rank // 4}{'!' * (rank in other)}", groups[rank // 4]),
                                         Alike("of all", everyone)], tells=rank % 3 == 0)
            for rank in everyone
        )  # fmt: skip
        return sum(amounts)

    telling = len(range(0, ranks, 3))
    for number in range(5):
        assert attendance(total(number, set()), ranks) == (ranks, telling, True)
        group = rng.choice([each for each in groups if len(each) > 1])
        other = set(rng.sample(group, rng.randrange(1, len(group))))
        assert attendance(total(number, other), ranks) == (ranks, telling, False)
