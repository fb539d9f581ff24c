"""Links that become slower are named, and what steps do beside their instructions is kept."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from schedc_runtime.offload.lanes import ThreadLanes
from schedc_runtime.speed.details import StepDetails
from schedc_runtime.speed.links import BASELINE, WINDOW, LinkRule, SlowLink, latencies
from schedc_runtime.testing import pool

LINKS = [(f"rank {a}", f"rank {b}") for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))]
SLOW = LINKS[2]


def told(count: int, slow: Callable[[int, tuple[str, str]], float], seed: int = 0) -> list[SlowLink]:
    """Alarms of so many windows behind the baseline. slow: ms by window and link, on top of 0.3 to 1.2."""
    draw, rule, found = random.Random(seed), LinkRule(), []
    for window in range(-BASELINE, count):
        added = {link: slow(window, link) if window >= 0 else 0.0 for link in LINKS}
        sample = {link: (draw.uniform(0.3, 1.2) + added[link]) * 1e6 for link in LINKS}
        found += rule.window(window * WINDOW, sample)
    return found


def test_a_slow_link_is_named_once_with_its_latency_and_beginning() -> None:
    for seed in range(20):
        (found,) = told(40, lambda window, link: 8.0 if link == SLOW and window >= 7 else 0.0, seed)
        assert (found.sender, found.receiver, found.since) == (*SLOW, 7 * WINDOW)
        assert 8e6 < found.latency < 9.2e6
        assert found.factor > 5
    assert found.told().startswith("messages from rank 1 to rank 2 take 8.")


def test_what_all_links_do_and_what_one_window_does_is_no_alarm() -> None:
    for seed in range(20):
        assert told(200, lambda *_: 0.0, seed) == []
        assert told(40, lambda window, _: 8.0 * (window > 7), seed) == []
        assert told(40, lambda window, link: 8.0 * (window == 7 and link == SLOW), seed) == []
        assert told(40, lambda window, link: 1.0 * (window > 7 and link == SLOW), seed) == []
    again = told(40, lambda window, link: 8.0 if link == SLOW and window // 5 in (1, 3) else 0.0)
    assert [found.since // WINDOW for found in again] == [5, 15]


def test_a_latency_counts_from_the_later_post_of_waits_that_blocked() -> None:
    """Messages 1 to 3 of both replicas go from rank 0 to rank 1, and have other times there."""
    sent = [[[1, 100], [2, 200], [3, 300], [4, 400]], []]
    late = [[[1, 1100], [2, 1200], [3, 1300], [4, 0]], []]
    waits = [[1, 0, 90, 150], [2, 0, 290, 350], [3, 0, 10, 370]]
    others = [[1, 0, 90, 2100], [2, 0, 290, 2200], [3, 0, 10, 2300]]
    everyone = [
        ["a0", 0, 0, [sent]], ["a1", 1, 0, [[[], waits]]],
        ["b0", 0, 1, [late]], ["b1", 1, 1, [[[], others]]],
    ]  # fmt: skip
    assert latencies(everyone) == [["a0", "a1", 55.0], ["b0", "b1", 1000.0]]  # of 50, 60, 70; of three times 1000
    everyone[1][3] = [[[], waits[:2]]]
    assert latencies(everyone) == [["b0", "b1", 1000.0]]  # two messages say too little


def test_details_of_a_step_and_an_end_without_traces() -> None:
    lanes, callbacks = ThreadLanes(), list(gc.callbacks)
    details, done = StepDetails([lanes], []), list[int]()
    lanes.join(lanes.run("d2h", lambda: done.append(1)))
    gc.collect(0)
    found = details.told()
    assert done == [1]
    assert [lane for lane, begin, end in found["lanes"] if begin <= end] == ["d2h"]
    assert [generation for generation, spent in found["gc"] if spent > 0] == [0]
    details.forget()
    assert details.told() == {}
    details.close()
    assert gc.callbacks == callbacks
    assert "run" not in vars(lanes)
    lanes.close()


@pytest.mark.processes
@pytest.mark.slow
def test_processes_name_the_link_whose_messages_leave_late(tmp_path: Path) -> None:
    """A busy machine delays the other link, too. What hides a delay of 15 ms does not hide one of 60 or 240."""
    for number, seconds in enumerate((0.015, 0.06, 0.24)):
        folder, steps = str(tmp_path / str(number)), 10 if number == 0 else 20
        given = {"slow": [[1, 0, seconds]], "windows": 1, "folder": folder, "steps": steps, "baseline": 4}
        everyone = pool(2).run("support.speed_cases:watched_links", **given)
        if any(told["found"] != [[]] for told in everyone):
            break
    assert everyone[0]["found"] == everyone[1]["found"]
    (((sender, receiver, factor, latency, _),),) = everyone[0]["found"]
    assert (sender, receiver) == ("rank 1", "rank 0")
    assert factor > 3
    assert latency > 8e6
    assert "messages from rank 1 to rank 0" in [line.split(" take ")[0] for line in everyone[0]["lines"]]
    assert not everyone[1]["lines"]


@pytest.mark.processes
@pytest.mark.slow
def test_rows_of_exchanges_and_of_experts_are_kept_with_each_step(tmp_path: Path) -> None:
    everyone = pool(2).run("support.speed_cases:watched_experts", folder=str(tmp_path))
    assert [told["steps"] for told in everyone] == [[1, 2], [1, 2]]  # the third ran without a watch
    for first, second in zip(*(told["notes"] for told in everyone), strict=True):
        assert first["exchanges"].keys() == second["exchanges"].keys() >= {"dispatch", "combine"}
        for label, (calls, size, sent, received) in first["exchanges"].items():
            other = second["exchanges"][label]
            assert (calls, sent[1], received[1]) == (other[0], other[3][0], other[2][0])
            assert size % sum(sent) == 0
        rows = [sum(map(sum, note["experts"].values())) for note in (first, second)]
        assert sum(rows) == 2 * 4 * 6 * 2 * len(first["experts"])  # two ranks with four rows of six tokens, two choices
        assert [generation for generation, _ in first["gc"]].count(1) >= 2
    loads = list(zip(*(told["loads"] for told in everyone), strict=True))
    assert len(loads) == 2 * len(everyone[0]["notes"][0]["experts"])  # two microbatches
    for mine, other in loads:
        assert mine[1:] == other[1:] == [max(mine[0], other[0]), (mine[0] + other[0]) / 2]
    assert any(mine[0] != other[0] for mine, other in loads)
