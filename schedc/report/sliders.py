"""Reports at which values of constants and figures of the cluster another plan is as fast as the first one."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf, isinf
from typing import Any

from schedc.planner.answers.settings import USABLE, Setting, chosen_settings
from schedc.planner.answers.sliders import EQUAL, EqualSteps, Slider, sliders_of
from schedc.planner.search.result import FoundPlan
from schedc.report.plans import COLUMNS

_LINES = 10
"""Ties of a table in the text; JSON has all."""

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
_SCALED = ("s", "B/s", "FLOP/s")
"""Units with a prefix for thousands, such as GB/s."""


def to_json(sliders: Sequence[Slider], files: Sequence[str]) -> dict[str, Any]:
    """The ``sliders`` of a search's JSON. files: names of the plans.

    equal: files of plans that take as long as the first one already. settings: the constants and figures that
    change a step, those with the nearest ties first. steps_s: by value, the step of each plan, null where it does
    not fit. width: of the constant's logarithm; null for a figure of the cluster. whole: whether values are whole
    numbers. ties: where a plan takes as long as the first one, nearest first. widths: how far that is; null for a
    figure. times: the value over the one that plans are priced with. no_effect: names of settings that change no
    step.
    """
    moved = [slider for slider in sliders if slider.matters]
    return {
        "plans": list(files),
        "equal": _equal(sliders, files),
        "settings": [_setting(slider, files) for slider in sorted(moved, key=_nearness)],
        "no_effect": [slider.setting.name for slider in sliders if not slider.matters],
    }


def _equal(sliders: Sequence[Slider], files: Sequence[str]) -> list[str]:
    """The other plans whose steps are those of the first one at the present values."""
    if not sliders:
        return []
    first, *others = sliders[0].steps[sliders[0].setting.values.index(sliders[0].setting.value)].tolist()
    return [file for file, step in zip(files[1:], others, strict=True) if abs(step - first) <= EQUAL * first]


def moved_plans(plans: Mapping[str, FoundPlan], names: tuple[str, ...]) -> dict[str, Any] | None:
    """`to_json` of plans by their names, each once; None without a plan. names: of the settings, all without one."""
    once = {plan.key(): name for name, plan in reversed([*plans.items()])}
    priced = {name: plan.priced for name, plan in plans.items() if once[plan.key()] == name and plan.priced is not None}
    if not priced:
        return None
    problem = next(iter(priced.values())).planned.problem
    return to_json(sliders_of([*priced.values()], chosen_settings(problem, names)), [*priced])


def _nearness(slider: Slider) -> tuple[bool, float]:
    """Constants first, by their nearest ties."""
    return not slider.setting.width, min((abs(tie.far) for tie in slider.ties), default=inf)


def _setting(slider: Slider, files: Sequence[str]) -> dict[str, Any]:
    setting = slider.setting
    return {
        "name": setting.name,
        "unit": setting.unit,
        "says": setting.says,
        "value": setting.value,
        "width": setting.width or None,
        "whole": setting.whole,
        "values": list(setting.values),
        "steps_s": [[None if isinf(step) else step for step in steps] for steps in slider.steps.tolist()],
        "ties": [_tie(setting, tie, files) for tie in slider.ties],
    }


def _tie(setting: Setting, tie: EqualSteps, files: Sequence[str]) -> dict[str, Any]:
    widths = tie.far if setting.width else None
    return {
        "plan": files[tie.plan],
        "value": tie.value,
        "widths": widths,
        "times": exp(tie.far * (setting.width or 1.0)),
        "step_s": tie.step_s,
    }


def with_prefix(value: float, unit: str) -> str:
    """A value with four digits and its unit: ``1.868 ms``, ``50 GB/s``, ``0.44 of peak``."""
    if unit not in _SCALED:
        return f"{value:.4g} {unit}".rstrip()
    scale, letter = next((each for each in _SCALES if value >= each[0]), _SCALES[-1])
    return f"{value / scale:.4g} {letter}{unit}"


def to_text(sliders: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan ... --explain`, of the JSON's ``sliders``."""
    first, others = _number(sliders["plans"][0]), len(sliders["plans"]) - 1
    if not others:
        yield f"sliders: {first} is the only plan, so no other one can be as fast"
        return
    yield f"where one of these plans is as fast as {first}, with all else as it is; other plans are not priced again"
    if sliders["equal"]:
        yield from _names(f"as fast as {first} anyway", [_number(file) for file in sliders["equal"]])
    for title, of_constants in (("constant", True), ("cluster", False)):
        yield from _table(title, [each for each in sliders["settings"] if (each["width"] is not None) == of_constants])
    untied = [each["name"] for each in sliders["settings"] if not each["ties"]]
    if untied:
        yield from _names("no other plan is as fast within 3 widths, or from x0.1 to x10, of", untied)
    if sliders["no_effect"]:
        yield from _names("without effect on these plans", sliders["no_effect"])


def _names(head: str, names: Sequence[str]) -> Iterator[str]:
    yield from textwrap.wrap(f"  {head}: {', '.join(names)}", COLUMNS, subsequent_indent="    ", break_on_hyphens=False)


def _table(title: str, settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The nearest ties of some settings: plans that tie at one value share a line."""
    rows = sorted((row for each in settings for row in _rows(each)), key=lambda row: row[0])
    if not rows:
        return
    cells = [
        (title, "now", "there", "widths" if title == "constant" else "times", "plans"),
        *(row[1] for row in rows[:_LINES]),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    for name, now, there, far, plans in cells:
        line = f"  {name:<{widths[0]}}  {now:>{widths[1]}}  {there:>{widths[2]}}  {far:>{widths[3]}}  {plans}"
        yield line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
    if len(rows) > _LINES:
        yield f"  and {len(rows) - _LINES} further lines; --json has all"


def _rows(setting: Mapping[str, Any]) -> Iterator[tuple[float, tuple[str, str, str, str, str]]]:
    """How far a value is, and its line."""
    plans = defaultdict[float, list[Mapping[str, Any]]](list)
    for tie in setting["ties"]:
        plans[float(f"{tie['value']:.6g}")].append(tie)
    unit = setting["unit"]
    for ties in plans.values():
        tie = ties[0]
        far = f"x{tie['times']:.3g}" if tie["widths"] is None else f"{tie['widths']:+.1f}"
        names = ", ".join(_number(each["plan"]) for each in ties)
        said = f"{names} at {tie['step_s']:#.4g} s" + (", 01 fits no more" if setting["name"] == USABLE else "")
        near = max(tie["times"], 1.0 / tie["times"]) if tie["widths"] is None else abs(tie["widths"])
        yield near, (setting["name"], with_prefix(setting["value"], unit), with_prefix(tie["value"], unit), far, said)


def _number(file: str) -> str:
    """The number of a plan's file."""
    return file.partition(".")[0]
