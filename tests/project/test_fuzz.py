"""A short run of the fuzzer with a fixed seed, and what longer runs have found."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from project import fuzz
from project.fuzz_inputs import Case
from schedc.cell.schedule import forget_programs
from support.sweeps import swept

pytestmark = pytest.mark.slow

COUNT = 400
PLANNED = swept(100_000, 100)
"""Inputs of each family that the planner reads."""


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, limit in fuzz.limits():
        monkeypatch.setattr(module, limit, getattr(module, limit))  # put back after the test
    fuzz.bounded()
    yield
    forget_programs()  # a short search found them


def test_only_diagnostics_come_out_of_any_input() -> None:
    lines: list[str] = []
    assert fuzz.fuzz(COUNT, 20, lines.append) == [], "\n".join(lines)
    ran = [int(found[1]) for line in lines if (found := re.search(r"inputs, +(\d+) ran", line))]
    assert sum(ran) >= COUNT // 20, "hardly anything gets beyond its syntax"


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["models", "clusters", "measured steps", "fits"])
def test_what_the_planner_reads_is_read_or_refused(family: str) -> None:
    lines: list[str] = []
    assert fuzz.fuzz(PLANNED, 5, lines.append, only=family) == [], "\n".join(lines)


def test_the_fuzzer_tells_of_faults_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(given: Case) -> str:
        while given.reader == "sched":
            pass
        raise IndexError("broken")

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setattr(fuzz, "READERS", dict.fromkeys(fuzz.READERS, broken))
    lines: list[str] = []
    assert fuzz.fuzz(6, 1, lines.append) == list(range(6))
    kinds = {word for line in lines for word in re.findall(r"FAULT (\w+)", line)}
    assert kinds == {"Hang", "IndexError"}


EMPTY_RANK = """schedule 1
name "x"
size "P" 2
size "M" 1
ranks 2
pipe 0 ..< 1 on 1
phase 0 ""
span 0 0:0-0:0
rank 0
rank 1
  0: 0F0@0 0B0
"""
HEAD = "schedule x(P: ranks = 4, M: microbatches = 8) {\nplace linear\nrank r {"

FOUND = {
    "nothing at all runs": ("sched", f"{HEAD} phase a repeat 0 {{ F }} }} }}", "S203"),
    "a rank has an empty body": ("sched", f"{HEAD} let d = r }} }}", "S203"),
    "a timed op whose index has no value": (
        "sched",
        f"{HEAD} phase t timed {{ for i in 0 ..< M {{ F @ 4 % r at 1 }} }} }} }}",
        "S116",
    ),
    "a rank without ops is drawn": ("schedule", EMPTY_RANK, "ran"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    reader, text, expected = FOUND[name]
    assert fuzz.outcome(Case(reader, text)) == expected
