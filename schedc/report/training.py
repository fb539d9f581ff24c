"""Reports the training run that is asked for: its steps, how failures count, and the sizes of a ramp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schedc.report.figures import counted, seconds_text

_SIZES = 6
"""Sizes of a ramp that are written; JSON has all."""


def training_texts(asked: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The run of the first plan, its ramp, and the sizes of the ramp that plans cannot take."""
    yield _run_text(asked, plans[0]["budget"])
    if not asked["ramp"]:
        return
    yield _ramp_text(asked["ramp"], plans[0])
    alike = defaultdict[tuple[str, str], list[str]](list)
    for plan in plans:
        refused = defaultdict[str, list[str]](list)
        for size in plan["budget"]["ramp"]:
            refused[size["reason"] or ""].append(f"{size['sequences']:,}")
        for reason, sizes in refused.items():
            alike[", ".join(sizes), reason].append(plan["file"].partition(".")[0])
    for (listed, reason), files in alike.items():
        if reason:
            yield f"in place of {listed} sequences, larger steps in {', '.join(files)}: {reason}"


def _ramp_text(ramp: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """How long the first plan takes at each size, and on the whole ramp."""
    budget, sizes = plan["budget"], [size for size in plan["budget"]["ramp"] if size["step_s"] is not None]
    steps = [f"{seconds_text(size['step_s'])} s at {size['sequences']:,}" for size in sizes]
    if len(steps) > _SIZES:
        steps = [*steps[: _SIZES - 1], "...", steps[-1]]
    at = ", ".join([*steps, f"{seconds_text(plan['step_s'])} s at {ramp['end']:,}"])
    days = f"{budget['ramp_days']:,.4g} of {budget['days']:,.4g} days"
    return f"the ramp over {counted(ramp['tokens'])} tokens takes {days}; a step of the first plan: {at} sequences"


def _run_text(asked: Mapping[str, Any], budget: Mapping[str, Any]) -> str:
    """The training run of the first plan, and how failures count."""
    tokens, daily = (counted(number) for number in (asked["tokens"], budget["tokens_per_day"]))
    run = f"a run of {tokens} tokens: {budget['steps']:,} steps, {daily} tokens a day"
    if asked["mtbf_hours"] is None:
        return f"{run}, without failures (--mtbf counts them)"
    every, share = budget["checkpoint_every"], 100 * budget["goodput"]
    return (
        f"{run}; failures every {asked['mtbf_hours']:,.0f} device-hours leave {share:.1f} % of the time, with a"
        f" checkpoint every {every:,} step{'s' if every > 1 else ''}"
    )
