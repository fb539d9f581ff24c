"""The result of a check over a range of sizes: its facts as JSON, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schedc.claims.check import Status
from schedc.claims.sweep import Sweep
from schedc.units import equations

MOST_SIZES = 8
"""Sizes besides the smallest that a text lists."""
_WORDS: dict[Status, str] = {
    "proved": "proved for all costs at",
    "order": "proved for the order of these costs (a policy) at",
    "tried": "not decidable, and held where it was tried, at",
    "refuted": "FAILS at",
    "vacuous": "no costs satisfy its condition at",
}


def to_json(name: str, size_range: str, result: Sweep) -> dict[str, Any]:
    """The facts that ``--json`` prints. name: of the schedule. size_range: as ``--sweep`` gives it."""
    facts = {"schema": "schedc.sweep", "version": 1, "schedule": name, "range": size_range}
    return {**facts, **result.to_json()}


def to_text(name: str, result: Sweep) -> Iterator[str]:
    """The result for people, a line each: the sizes, every claim, and the sizes that fail."""
    yield f"{name}: {result.tried} sizes checked, {result.refused} refused, {result.failed} failed"
    for text, counts in result.claims:
        yield f"expect {text}: {_counted(counts)}"
    if result.smallest:
        yield f"the smallest size that fails: {equations(result.smallest.sizes)}"
    if others := result.failing[1:]:
        more = f"; and {len(others) - MOST_SIZES} more" if len(others) > MOST_SIZES else ""
        yield f"others that fail: {'; '.join(map(equations, others[:MOST_SIZES]))}{more}"


def _counted(counts: Mapping[Status, int]) -> str:
    """The number of sizes at which a claim had each status, in words."""
    total = sum(counts.values())
    present = [(words, counts[status]) for status, words in _WORDS.items() if counts[status]]
    if len(present) == 1 and total > 1:
        return f"{present[0][0]} all {total} sizes"
    return ", ".join(f"{words} {count} size{'s' * (count > 1)}" for words, count in present) or "checked at no size"
