"""Cases of comparisons, and the verdict of a word over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A comparison: what was compared, whether both agree, and the figures."""

    name: str
    agrees: bool
    figures: Mapping[str, Any]


class Options(NamedTuple):
    """What a word is asked for. cases: how many; 0 for its own number. seed: of what it draws. jobs: processes."""

    cases: int = 0
    seed: int = 0
    jobs: int = 1


class Verdict(NamedTuple):
    """What a word found. cases: comparisons. failed: those without agreement. figures: by name."""

    cases: int
    failed: tuple[str, ...]
    figures: Mapping[str, Any]


def verdict_of(cases: Sequence[Case]) -> Verdict:
    """The verdict over cases, with the figures of each."""
    figures = {case.name: {"agrees": case.agrees, **case.figures} for case in cases}
    return Verdict(len(cases), tuple(case.name for case in cases if not case.agrees), figures)
