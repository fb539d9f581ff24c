"""The report of a step of given rows: facts as JSON, and a text made from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.compiler import Analysis
from schedc.ir.arrays import Floats
from schedc.plan.price_rows import price_rows
from schedc.source import Source

_WIDTH = 32
"""Places of the order in one line of text."""


def to_json(analysis: Analysis, source: Source, rows: Floats) -> dict[str, Any]:
    """The facts. Times are in the unit of the costs. smallest, largest: costs of microbatches over their mean."""
    prices = price_rows(analysis, source, rows)
    return {
        "rows": len(rows),
        "microbatches": prices.order.size,
        "smallest": float(prices.costs.min()),
        "largest": float(prices.costs.max()),
        "equal": prices.equal,
        "given": prices.given,
        "ordered": prices.ordered,
        "bound": prices.bound,
        "order": prices.order.tolist(),
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    count, given, ordered = facts["microbatches"], facts["given"], facts["ordered"]
    yield (
        f"rows: {facts['rows']} in {count} microbatches of {facts['smallest']:.3g} to {facts['largest']:.3g} times "
        "their mean cost"
    )
    below = f"; no order of them goes below {facts['bound']:g}"
    share = f" ({ordered / given:.3f} of that)" if given else ""
    yield f"  as they come {given:g}, ordered {ordered:g}{share}, all of mean cost {facts['equal']:g}{below}"
    for first in range(0, count, _WIDTH):
        places = " ".join(map(str, facts["order"][first : first + _WIDTH]))
        yield f"  {'order' if not first else '     '} {places}"
