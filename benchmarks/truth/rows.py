"""The word `rows`: published rows as plans of the wide space, or the rule that leaves them out.

A row in the space is searched for alone where its order is short. The step then equals `schedc fit --predict`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from schedc.planner.fit.predict import predict
from schedc.planner.fit.rows import MeasuredRows, load_rows
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import INNER_LAWS, OUTER, PlanSpace
from schedc.planner.times.problem import TrainingRun
from truth.cases import Options, Verdict

PUBLISHED = Path(__file__).parents[1] / "published"
_EQUAL = 1e-9
_ROOM = 2**50
"""Bytes of a device: more than any row needs."""
LARGEST = 48
"""Forwards of an order that is searched for."""


class RowCase(NamedTuple):
    """A row. reason: what leaves it out; empty for a plan of the space.

    off: how far the searched step is from the predicted one; None for a row that is not searched for.
    """

    name: str
    reason: str
    off: float | None = None


def rows(options: Options) -> Verdict:
    """The word `rows`. options: cases, where above 0, takes only so many files, those with the fewest rows."""
    files = {path.stem: load_rows(path) for path in sorted(PUBLISHED.glob("*.csv"))}
    names = sorted(files, key=lambda name: len(files[name].rows))[: options.cases or None]
    cases = {name: row_cases(files[name]) for name in names}
    every = [case for name in names for case in cases[name]]
    searched = {case.name: case.off for case in every if case.off is not None}
    left = {name: dict(Counter(case.reason for case in cases[name] if case.reason)) for name in names}
    figures = {
        "in the space": sum(not case.reason for case in every),
        "searched": len(searched),
        "largest difference": max(searched.values(), default=0.0),
        "left out": {name: reasons for name, reasons in left.items() if reasons},
    }
    return Verdict(len(every), tuple(name for name, off in searched.items() if not off <= _EQUAL), figures)


def row_cases(measured: MeasuredRows) -> list[RowCase]:
    """The cases of the rows of a file."""
    reasons = {row.name: left_out(row.run) for row in measured.rows}
    forwards = {row.name: row.run.axes.stages * row.run.axes.microbatches for row in measured.rows}
    short = [row for row in measured.rows if not reasons[row.name] and forwards[row.name] <= LARGEST]
    predicted = predict(replace(measured, rows=tuple(short)), {}) if short else []
    off = {each.row.name: abs(searched_step(each.row.run) / each.step_s - 1.0) for each in predicted}
    return [RowCase(name, reason, off.get(name)) for name, reason in reasons.items()]


def searched_step(run: TrainingRun) -> float:
    """Seconds of the step that a search finds in the part of the space that has the axes of a run."""
    wanted = {name: int(value) if isinstance(value, bool) else value for name, value in asdict(run.axes).items()}
    space = replace(
        _space(run), conditions=tuple(read_condition(f"{name} == {value}") for name, value in wanted.items())
    )
    (best,) = search(space, replace(run.problem, cluster=space.cluster), SearchOptions(top=2)).plans
    assert best.axes == run.axes
    return best.step_s


def left_out(run: TrainingRun) -> str:
    """The rule of the wide space that leaves a run out; empty where it is a plan of the space."""
    space, axes = _space(run), run.axes
    own: dict[str, Any] = {name: getattr(axes, name) for name in (*OUTER, "zero")}
    own |= {"levels": (axes.recompute, axes.where), "layouts": axes.layout, "methods": axes.alltoall}
    own["overlaps"] = axes.overlap
    for name, value in own.items():
        if value not in getattr(space.values, name):
            rules = [
                rule.why for rule in space.values.left if value in rule.values and rule.axis in (name, _AXIS.get(name))
            ]
            return f"{_AXIS.get(name, name)} {value}: {rules[0] if rules else 'no candidate'}"
    values = replace(space.values, **{name: (value,) for name, value in own.items()})
    alone = replace(space, values=values, _orders={})
    for remaining in (*alone.met, alone.ordered):
        if not remaining.combinations:
            return remaining.what
    plans = (block.axes(int(number)) for block in alone.blocks() for number in block.numbers())
    if axes in plans:
        return ""
    prefix = next(alone.prefixes())
    laws = (law for law in INNER_LAWS if law.axis in own and not law.keeps(own[law.axis], prefix, space.model))
    return next((law.says for law in laws), "no reason")


_AXIS = {"levels": "recompute", "layouts": "layout", "methods": "alltoall", "overlaps": "overlap"}
"""The axes that have other names among the values of a space."""


def _space(run: TrainingRun) -> PlanSpace:
    """The wide space of a run's model, batch and devices, with memory for any plan: published rows ran."""
    cluster = replace(run.problem.cluster, device=replace(run.problem.cluster.device, hbm_bytes=_ROOM))
    return PlanSpace.of(run.model, cluster, run.problem.sequences, run.model.seq, "wide")
