"""Four gloo ranks of dualpipev, one of them made slower: whether a watch of speed names the rank and the kind.

A slowdown burns processor time inside of instructions of one kind, or of all, for 40 steps. It begins anywhere in a
window of ten steps. It is found if an alarm names its rank and kind: "all kinds" where all are slower. An alarm that
names another rank is wrong. A window is ten steps of all four ranks, and counts once. Those without a slowdown count
false alarms. Messages of each link between neighbours leave late in turn: that link alone must be named.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from schedc_runtime.speed.rule import ALL, WINDOW
from schedc_runtime.testing import pool
from support.speed_cases import REST, Slowdown

KINDS = ("", "F", "FB", "W", "I", "B")
FOUND = {1.25: 0.95, 1.5: 1.0}
"""By factor: the share of slowdowns that must be found."""
MOST_FALSE = 1 / 1000
"""False alarms in a quiet window."""
LEVEL_0, LEVEL_2 = 0.005, 0.05
"""What a watch may cost of a step's processor time."""
DELAY, LINK_WINDOWS = 0.01, 20
"""Seconds by which the messages of a slow link are later. Windows of five steps before the first."""
QUIET = 1000
"""Quiet windows of a run, before those between slowdowns."""


def slowdowns() -> list[Slowdown]:
    """Each rank and kind with both factors."""
    return [Slowdown(rank, kind, factor) for factor in FOUND for kind in KINDS for rank in range(4)]


def judged(slow: Slowdown, alarms: list[list[Any]]) -> tuple[bool, bool]:
    """Whether a slowdown was found, and whether another rank was named."""
    right = any(rank == slow.rank and kind == (slow.kind or ALL) for rank, kind, *_ in alarms)
    return right, any(rank != slow.rank for rank, *_ in alarms)


def detect(quiet: int = QUIET) -> dict[str, Any]:
    """The figures of the word ``detect``."""
    planned = slowdowns()
    told = pool(4).run("support.speed_cases:watched_training", slowdowns=planned, windows=quiet, timeout=3600)[0]
    outcomes = [(slow, *judged(slow, alarms)) for slow, (_, alarms) in zip(planned, told["found"], strict=True)]
    shares = {
        factor: statistics.fmean(found for slow, found, _ in outcomes if slow.factor == factor) for factor in FOUND
    }
    false, windows = len(told["quiet"]), quiet + len(planned) * REST // WINDOW
    failed = [factor for factor, least in FOUND.items() if shares[factor] < least]
    wrong = sum(wrong for *_, wrong in outcomes)
    links, level0, level2 = slow_links(), cost_of_level(0), cost_of_level(2)
    missed_links = links["links"] - links["found_links"] + links["wrong_links"] + links["false_links"]
    return {
        "cases": len(planned) + windows + links["links"] + links["link_windows"],
        "failed": len(failed)
        + (false > max(1, windows * MOST_FALSE))
        + wrong
        + missed_links
        + (level0 > LEVEL_0)
        + (level2 > LEVEL_2),
        "found_1_25": shares[1.25],
        "found_1_5": shares[1.5],
        "missed": [list(slow) for slow, found, _ in outcomes if not found],
        "wrong_rank": wrong,
        "windows": windows,
        "false_alarms": false,
        "named_falsely": told["quiet"],
        **links,
        "level0": level0,
        "level2": level2,
    }


def slow_links() -> dict[str, int]:
    """Each link between neighbours, whose messages leave 10 ms late for 20 steps: found, and others named or false."""
    planned = [[a, b, DELAY] for low in range(3) for a, b in ((low, low + 1), (low + 1, low))]
    with tempfile.TemporaryDirectory() as folder:
        told = pool(4).run(
            "support.speed_cases:watched_links", slow=planned, windows=LINK_WINDOWS, folder=folder, timeout=3600
        )[0]
    named = [{(sender, receiver) for sender, receiver, *_ in found} for found in told["found"]]
    wanted = [(f"rank {sender}", f"rank {receiver}") for sender, receiver, _ in planned]
    return {
        "links": len(planned),
        "found_links": sum(link in found for link, found in zip(wanted, named, strict=True)),
        "wrong_links": sum(len(found - {link}) for link, found in zip(wanted, named, strict=True)),
        "link_windows": LINK_WINDOWS + 2 * len(planned),
        "false_links": len(told["quiet"]),
    }


def cost_of_level(level: int, rounds: int = 60, steps: int = WINDOW) -> float:
    """What a step of four processes takes more of the processor at a level, as a share: a median of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        times = pool(4).run(
            "support.speed_cases:watched_costs", level=level, folder=folder, rounds=rounds, steps=steps, timeout=3600
        )
    totals = [[sum(column) for column in zip(*ranks, strict=True)] for ranks in zip(*times, strict=True)]
    return statistics.median(watched / plain for plain, watched in totals) - 1
