"""Reports a search for plans as text: its space, its counts, a table of plans with the best first, its certificate."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedc.planner.space.axes import TITLES
from schedc.report.certificate import certificate_text
from schedc.report.chances import chances_texts
from schedc.report.figures import seconds_text, word
from schedc.report.intervals import whose_text, wide_text
from schedc.report.training import training_texts
from schedc.report.under_record import record_texts

COLUMNS = 100
"""Characters of a line."""

_FREE = "*"
_WHOLE = "\N{NO-BREAK SPACE}"
_LONGEST = 22
"""Characters of a cell; a longer name is cut."""
_SOFTWARE = {"schedc": "schedc", "megatron-core": "mcore", "torchtitan": "titan"}
"""By software that may run a plan, its short name."""

_CLOSE = 0.01
"""Steps that differ by less, relatively, decide nothing."""

PlanFacts = Mapping[str, Any]
"""A plan of the JSON: an entry of ``plans``."""


@dataclass(frozen=True)
class PlanColumn:
    """A column of the table.

    key: what the column sorts by. axes: those whose values it has. left: whether its cells start at the left edge.
    always: whether the table has it even if all plans have one value. needs: a fact of the plan or of its budget;
    without it the column is left out. below: whether it is named below the table where it is not in it. dispensable:
    whether it leaves a table that is too wide for a line below, with the value of the first plan.
    """

    title: str
    cell: Callable[[PlanFacts], str]
    key: Callable[[PlanFacts], float | str]
    axes: tuple[str, ...] = ()
    left: bool = False
    always: bool = True
    needs: str = ""
    below: bool = False
    dispensable: bool = False

    @property
    def narrow(self) -> bool:
        """Whether it has the small numbers of an axis, which stand close together."""
        return bool(self.axes) and not self.left


def _axis(name: str, left: bool = False, always: bool = True) -> PlanColumn:
    def value(plan: PlanFacts) -> Any:
        return plan["axes"][name]

    title = TITLES.get(name, name)
    return PlanColumn(title, lambda plan: word(value(plan)), value, (name,), left, always, below=True)


def _interval(plan: PlanFacts) -> str:
    return f"{seconds_text(plan['step_low_s'])}-{seconds_text(plan['step_high_s'])}"


def schedule_text(axes: Mapping[str, Any]) -> str:
    """The schedule, with the limit that an order by costs keeps."""
    return f"{axes['schedule']} {axes['limit']}" if axes.get("limit") else str(axes["schedule"])


def recompute_text(axes: Mapping[str, Any]) -> str:
    """The level of recomputation, and where it holds if not everywhere."""
    everywhere = axes["recompute"] == "none" or axes.get("where", "all") == "all"
    return str(axes["recompute"]) if everywhere else f"{axes['recompute']} {word(axes['where'])}"


def axes_text(axes: Mapping[str, Any]) -> str:
    """All axes in one line: `tp 8, pp 16, ...`."""
    own = {"schedule": schedule_text(axes), "recompute": recompute_text(axes)}
    names = [name for name in axes if name not in ("limit", "where") and (name != "spare" or axes["spare"])]
    return ", ".join(f"{name} {own.get(name, word(axes[name]))}" for name in names)


def _words(name: str, text: Callable[[Mapping[str, Any]], str], second: str) -> PlanColumn:
    """A column of words about two axes."""
    return PlanColumn(
        name, lambda plan: text(plan["axes"]), lambda plan: text(plan["axes"]), (name, second), left=True, below=True
    )


def runs_on_text(plan: PlanFacts) -> str:
    """The software that runs a plan, by short names."""
    return ", ".join(_SOFTWARE[name] for name, reason in plan["runs_on"].items() if reason is None) or "none"


def _budget(title: str, fact: str, form: str) -> PlanColumn:
    """A column of the training run that is asked for."""
    return PlanColumn(
        title, lambda plan: form.format(plan["budget"][fact]), lambda plan: plan["budget"][fact], needs=fact
    )


TABLE: tuple[PlanColumn, ...] = (
    PlanColumn("step s", lambda plan: seconds_text(plan["step_s"]), lambda plan: plan["step_s"]),
    PlanColumn("90 %", _interval, lambda plan: plan["step_high_s"]),
    PlanColumn(
        "tok/s/dev",
        lambda plan: f"{plan['tokens_per_s_per_device']:,.4g}",
        lambda plan: plan["tokens_per_s_per_device"],
        dispensable=True,
    ),
    PlanColumn(
        "first in", lambda plan: f"{100 * plan['first_in']:.0f} %", lambda plan: plan["first_in"], needs="first_in"
    ),
    PlanColumn(
        "slow s", lambda plan: seconds_text(plan["slow"]["step_s"]), lambda plan: plan["slow"]["step_s"], needs="slow"
    ),
    _budget("days", "days", "{:,.4g}"),
    _budget("device-h", "device_hours", "{:,.0f}"),
    _budget("cost", "cost", "{:,.0f}"),
    _budget("per Mtok", "cost_per_million", "{:.4g}"),
    _budget("MWh", "MWh", "{:,.4g}"),
    PlanColumn("MFU", lambda plan: f"{100 * plan['mfu']:.1f}%", lambda plan: plan["mfu"]),
    PlanColumn(
        "GB", lambda plan: f"{plan['memory']['needed_bytes'] / 1e9:.1f}", lambda plan: plan["memory"]["needed_bytes"]
    ),
    _axis("tp"),
    _axis("pp"),
    _axis("vpp"),
    _axis("ep"),
    _axis("cp"),
    _axis("dp"),
    _axis("zero"),
    PlanColumn(
        "spare",
        lambda plan: word(plan["spare"]),
        lambda plan: plan["spare"],
        ("spare",),
        always=False,
        needs="spare",
        below=True,
    ),
    _axis("microbatch"),
    _axis("microbatches", always=False),
    _words("schedule", schedule_text, "limit"),
    _axis("overlap", left=True, always=False),
    _words("recompute", recompute_text, "where"),
    _axis("layout", left=True, always=False),
    _axis("alltoall", left=True),
    PlanColumn(
        "copies", lambda plan: str(plan["copies"]), lambda plan: plan["copies"], left=True, needs="copies", below=True
    ),
    PlanColumn("runs on", runs_on_text, runs_on_text, left=True, always=False, needs="runs_on", below=True),
    PlanColumn("file", lambda plan: str(plan["file"]), lambda plan: plan["file"], left=True),
)
"""Columns that are the same in all plans and not always there are named below the table."""


def to_text(facts: Mapping[str, Any], stages: bool = False) -> Iterator[str]:
    """The lines of `schedc plan MODEL CLUSTER`, of its JSON. stages: whether they say the seconds of each stage."""
    yield title_text(facts)
    yield from _counts(facts, stages)
    yield ""
    if facts["plans"]:
        yield from plan_table([*facts["plans"], *facts["also"]])
        yield ""
    for remark in remarks(facts):
        yield from textwrap.wrap(remark, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    yield certificate_text(facts)


def title_text(facts: Mapping[str, Any]) -> str:
    """Model, cluster and batch."""
    cluster, batch = facts["cluster"], facts["batch"]
    step = f"a step of {batch['sequences']:,} sequences of {batch['seq']:,} tokens"
    precision = "" if facts["precision"] == "bf16" else f", products in {facts['precision']}"
    skew = "" if facts["skew"] == 1.0 else f", fullest expert ranks at {facts['skew']:g} times the mean rows"
    if facts.get("spread") and not facts.get("spread_assumed"):
        skew = f", loads of experts that spread by {facts['spread']:.3g} of their mean"
    return f"{facts['model']['name']} on {cluster['devices']:,} devices of {cluster['name']}, {step}{precision}{skew}"


def _counts(facts: Mapping[str, Any], with_stages: bool) -> Iterator[str]:
    space, counts, seconds = facts["space"], facts["counts"], facts["seconds"]
    yield f"space     {space['raw']:,} points, {space['legal']:,} legal plans, {space['fit']:,} within memory"
    orders = f"{counts['simulated']:,} simulated in {counts['orders']:,} orders"
    yield f"searched  {counts['bounded']:,} bounded, {orders}, {counts['priced']:,} priced inside cells"
    stages = ", ".join(f"{name} {each:.3g}" for name, each in seconds["by_stage"].items() if with_stages)
    yield f"seconds   {seconds['cpu']:.3g} CPU, {seconds['wall']:.3g} elapsed, beside imports and files" + (
        f"; {stages}" if stages else ""
    )
    yield f"fit       {fit_line(facts['fit'])}"
    yield from (f"          {origin}" for origin in facts["origins"])
    yield from (f"rows      {assumed}" for assumed in assumed_texts(facts))


def assumed_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is assumed of the rows that come to experts, and how to say it."""
    if facts.get("spread_assumed"):
        yield f"loads of experts spread by {facts['spread']:.3g} of their mean: assumed; say --skew or --routing"


def fit_line(fit: Mapping[str, Any] | None) -> str:
    """Which constants the times are from, and how far off they were on rows left out."""
    if not fit or not fit["name"]:
        return "none: constants are at their priors"
    error = "" if fit["cv_mape_pct"] is None else f", {fit['cv_mape_pct']:.1f} % mean error on rows left out"
    forced = "; it has not seen this device or this precision (--force-fit)" if fit["forced"] else ""
    return f"{fit['name']}: {fit['rows']:,} rows{error}{forced}"


# The table.


def plan_table(plans: Sequence[PlanFacts], columns: int = COLUMNS) -> Iterator[str]:
    """The plans as a table of at most so many characters, and what is the same in all of them below it.

    A value with a star is free: the others of its axis give the same step and memory. Where the table is too wide,
    columns of one value leave it. Then stand below it: the software that runs a plan, tokens per second, and the axes.
    """
    shown = [column for column in columns_of(plans) if column.always or _varies(column, plans)]
    for column in [each for each in shown if each.below and not _varies(each, plans)]:
        if _width(shown, plans) <= columns:
            break
        shown.remove(column)
    apart: list[PlanColumn] = []
    left: list[PlanColumn] = []
    for column in [each for each in shown if each.needs == "runs_on"] + [each for each in shown if each.dispensable]:
        if _width(shown, plans) > columns:
            shown.remove(column)
            (left if column.dispensable else apart).append(column)
    if _width(shown, plans) <= columns:
        yield from _rows(shown, plans)
    else:
        yield from _rows([column for column in shown if not column.axes], plans)
        yield from _rows([column for column in shown if column.axes or column is TABLE[-1]], plans)
    for column in left:
        yield f"{column.title} of {_number(plans[0])}: {cell_text(column, plans[0])}"
    for column in apart:
        yield from textwrap.wrap(f"run: {_by_value(column, plans)}", columns, subsequent_indent="  ")
    hidden = [column for column in columns_of(plans) if column.below and column not in [*shown, *apart]]
    same = [f"{column.title} {cell_text(column, plans[0])}" for column in hidden]
    if same:
        text = "the same in all: " + ", ".join(each.replace(" ", _WHOLE) for each in same)
        yield from (line.replace(_WHOLE, " ") for line in textwrap.wrap(text, columns, subsequent_indent="  "))
    if any(plan["free"] for plan in plans):
        yield f"{_FREE} free: other values of this axis give the same step and memory"


def _rows(shown: Sequence[PlanColumn], plans: Sequence[PlanFacts]) -> Iterator[str]:
    """A line of titles, and a line for each plan."""
    widths = [_column_width(column, plans) for column in shown]
    yield _row([column.title for column in shown], shown, widths)
    for plan in plans:
        yield _row([cell_text(column, plan) for column in shown], shown, widths)


def columns_of(plans: Sequence[PlanFacts]) -> list[PlanColumn]:
    """The columns that these plans have facts for."""
    first = plans[0] if plans else {}
    facts = {**first, **(first.get("budget") or {})}
    return [column for column in TABLE if not column.needs or facts.get(column.needs) is not None]


def cell_text(column: PlanColumn, plan: PlanFacts) -> str:
    """The cell of a plan; with a star if the axis is free."""
    free = any(axis in plan["free"] for axis in column.axes)
    text = column.cell(plan) + (_FREE if free else "")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _by_value(column: PlanColumn, plans: Sequence[PlanFacts]) -> str:
    """The values of a column, each with the plans that have it."""
    files = defaultdict[str, list[str]](list)
    for plan in plans:
        files[cell_text(column, plan)].append(_number(plan))
    return "; ".join(f"{', '.join(numbers)} on {value}" for value, numbers in files.items())


def _number(plan: PlanFacts) -> str:
    """The number of a plan, with which its file begins."""
    return str(plan["file"]).partition(".")[0]


def _varies(column: PlanColumn, plans: Sequence[PlanFacts]) -> bool:
    cells = {cell_text(column, plan) for plan in plans}
    return len(cells) > 1


def _column_width(column: PlanColumn, plans: Sequence[PlanFacts]) -> int:
    return max(len(column.title), *(len(cell_text(column, plan)) for plan in plans))


def _width(shown: Sequence[PlanColumn], plans: Sequence[PlanFacts]) -> int:
    return sum(_column_width(column, plans) + _gap(shown, number) for number, column in enumerate(shown))


def _gap(shown: Sequence[PlanColumn], number: int) -> int:
    """Characters between a column and the one before it."""
    if number == 0:
        return 0
    return 1 if shown[number].narrow and shown[number - 1].narrow else 2


def _row(cells: Sequence[str], shown: Sequence[PlanColumn], widths: Sequence[int]) -> str:
    line = ""
    for number, (cell, column, width) in enumerate(zip(cells, shown, widths, strict=True)):
        line += " " * _gap(shown, number) + (cell.ljust(width) if column.left else cell.rjust(width))
    return line.rstrip()


# What stands below it.


def remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    """The training run, which software does not run plans, what the space leaves out, and sizes beyond the fit."""
    if facts.get("training") and facts["plans"]:
        yield from training_texts(facts["training"], facts["plans"])
    yield from record_texts(facts)
    yield from chances_texts(facts)
    if facts.get("slow") and facts["plans"]:
        yield slow_text(facts["slow"], facts["plans"][0])
    yield from not_run_texts([*facts["plans"], *facts["also"]])
    yield whose_text(facts["fit"])
    if facts["plans"] and (wide := wide_text(facts["plans"][0]["interval"])):
        yield f"the interval of the best plan: {wide}"
    yield from _jobless_texts(facts["plans"])
    if facts["axis_ends"]:
        yield f"of the best plan, {', '.join(facts['axis_ends'])}"
    if facts["space"]["restrictions"]:
        yield f"the space: {'; '.join(facts['space']['restrictions'])} (all: --space-facts)"
    unused = defaultdict[str, list[str]](list)
    for left in facts["left_out"]:
        unused[left["reason"]].append(left["schedule"])
    for reason, schedules in unused.items():
        yield f"no plan of any space has the schedule {' or '.join(schedules)}: {reason}"
    if facts["extrapolates"]:
        yield f"beyond what the fit has seen: {', '.join(facts['extrapolates'])}"


def _jobless_texts(plans: Sequence[PlanFacts]) -> Iterator[str]:
    """Plans without a job, by reason, where jobs were asked for."""
    files = defaultdict[str, list[str]](list)
    for plan in plans:
        if plan.get("job") and plan["job"]["reason"] is not None:
            files[plan["job"]["reason"]].append(_number(plan))
    yield from (f"no job for {', '.join(numbers)}: {reason}" for reason, numbers in files.items())


def not_run_texts(plans: Sequence[PlanFacts]) -> Iterator[str]:
    """Why software does not run plans: each reason with the plans that it holds for."""
    files = defaultdict[tuple[str, str], list[str]](list)
    for plan in plans:
        for name, reason in plan.get("runs_on", {}).items():
            if reason is not None:
                files[name, reason].append(_number(plan))
    for name, reason in sorted(files, key=lambda refusal: list(_SOFTWARE).index(refusal[0])):
        numbers = files[name, reason]
        which = "any of them" if len(numbers) == len(plans) > 1 else ", ".join(numbers)
        yield f"{name} does not run {which}: {reason}"


def slow_text(asked: Mapping[str, Any], plan: PlanFacts) -> str:
    """The step of the first plan with slow devices, and whether it is shorter without their nodes."""
    slow, several = plan["slow"], asked["devices"] > 1
    ranks = ", ".join(str(rank) for rank in slow["ranks"])
    devices = f"{asked['devices']:,} devices take" if several else "one device takes"
    longer = 100 * (slow["step_s"] / plan["step_s"] - 1)
    worst = "at worst" if slow["all_tried"] else "or more"
    then = f"where {devices} {asked['factor']:g} times as long, the first plan takes {seconds_text(slow['step_s'])} s"
    then += f" {worst}, {longer:.1f} % more (pipeline rank{'s' if len(slow['ranks']) > 1 else ''} {ranks})"
    nodes = "their nodes" if several else "its node"
    if slow["without"] is None:
        return f"{then}; no number of replicas makes the plan without {nodes}"
    without = slow["without"]
    advice = f"leave {nodes} out" if without["step_s"] < slow["step_s"] else f"keep {nodes}"
    if abs(without["step_s"] / slow["step_s"] - 1) < _CLOSE:
        advice = "about as long"
    size = f"dp {without['dp']} on {without['devices']:,} devices"
    return f"{then}; without {nodes} it takes {seconds_text(without['step_s'])} s with {size}: {advice}"
