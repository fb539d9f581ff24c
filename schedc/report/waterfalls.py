"""Reports the waterfalls of two plans beside each other: why one is faster than the other, bar by bar."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schedc.report.figures import seconds_text, word
from schedc.report.plans import COLUMNS, PlanFacts

_REASONS = 4
"""Differences that the last line names."""
_WIDTH = 24
"""Characters of the longest drawn difference."""


def to_json(first: PlanFacts, second: PlanFacts) -> dict[str, Any]:
    """What `schedc plan compare A B --json` prints.

    bars: by cause, the seconds that it adds to either step, and what the second plan takes longer. They add up to the
    steps. axes: those in which the plans differ, with both values.
    """
    bars = [
        {"what": what, "seconds": [a, b], "difference_s": b - a}
        for what, a, b in _beside(first["waterfall"], second["waterfall"])
    ]
    axes = {
        name: [first["axes"].get(name), second["axes"].get(name)]
        for name in first["axes"] | second["axes"]
        if first["axes"].get(name) != second["axes"].get(name)
    }
    return {
        "schema": "schedc.plan_comparison",
        "version": 1,
        "files": [first["file"], second["file"]],
        "step_s": [first["step_s"], second["step_s"]],
        "needed_bytes": [first["memory"]["needed_bytes"], second["memory"]["needed_bytes"]],
        "axes": axes,
        "bars": bars,
    }


def _beside(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, float, float]]:
    """(cause, seconds, seconds) in the order of the first waterfall; then causes that only the second has."""
    own = {bar["what"]: float(bar["seconds"]) for bar in first}
    other = {bar["what"]: float(bar["seconds"]) for bar in second}
    for what in own | other:
        yield what, own.get(what, 0.0), other.get(what, 0.0)


def to_text(facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan compare A B`, of its JSON."""
    files, steps, bars = facts["files"], facts["step_s"], facts["bars"]
    yield f"A  {files[0]}  {seconds_text(steps[0])} s, {facts['needed_bytes'][0] / 1e9:.1f} GB"
    yield f"B  {files[1]}  {seconds_text(steps[1])} s, {facts['needed_bytes'][1] / 1e9:.1f} GB"
    axes = ", ".join(f"{name} {word(a)} | {word(b)}" for name, (a, b) in facts["axes"].items())
    yield from textwrap.wrap(
        f"axes  {axes or 'all equal'}", COLUMNS, subsequent_indent="      ", break_on_hyphens=False
    )
    yield ""
    name = max(len("seconds"), *(len(bar["what"]) for bar in bars))
    longest = max((abs(bar["difference_s"]) for bar in bars), default=0.0)
    digits = _decimals(max(steps))
    yield f"{'seconds':<{name}}  {'A':>9}  {'B':>9}  {'B - A':>9}"
    for bar in bars:
        mark = _mark(bar["difference_s"], longest)
        yield f"{bar['what']:<{name}}  {_numbers(bar['seconds'], digits)}  {mark}".rstrip()
    yield f"{'step':<{name}}  {_numbers(steps, digits)}".rstrip()
    yield ""
    yield "Exchanges, messages and sums of gradients count where no compute hides them."
    yield reason_text(facts)


def _decimals(step: float) -> int:
    """Decimals that show five digits of a step."""
    return max(0, 4 - math.floor(math.log10(step))) if step > 0 else 0


def _numbers(seconds: Sequence[float], decimals: int) -> str:
    first, second = seconds
    gap = round(second - first, decimals)
    difference = f"{gap:>+9.{decimals}f}" if gap else ""
    return f"{first:>9.{decimals}f}  {second:>9.{decimals}f}  {difference}"


def _mark(difference: float, longest: float) -> str:
    count = round(_WIDTH * abs(difference) / longest) if longest else 0
    return ("+" if difference > 0 else "-") * count


def reason_text(facts: Mapping[str, Any]) -> str:
    """Which plan is faster, and by which bars most."""
    first, second = facts["step_s"]
    if first == second:
        return "A and B take the same time"
    faster, sign = ("A", 1.0) if first < second else ("B", -1.0)
    gap = abs(second - first)
    causes = sorted(facts["bars"], key=lambda bar: -abs(bar["difference_s"]))[:_REASONS]
    least = 0.01 * gap
    said = [f"{bar['what']} {-sign * bar['difference_s']:+.4g} s" for bar in causes if abs(bar["difference_s"]) > least]
    return f"{faster} is faster by {gap:.4g} s, {100 * gap / max(first, second):.1f} %: {', '.join(said)}"
