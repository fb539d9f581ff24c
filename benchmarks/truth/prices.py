"""One price: what is predicted of a row, searched, written into files and explained is one number.

Random rows are written as CSV, with files of their models and clusters, and predicted. A search is asked for the plan
of each row alone. The compiler reads the written plan and cost files. The bars of the waterfall are added. All figures
that `schedc plan --json` prints of the plan are read back. Fits evaluate the same run. Orders that follow costs are
left out there: fits keep the order of the prior medians.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from schedc.planner.cluster.values import Cluster
from schedc.planner.fit.columns import COLUMNS
from schedc.planner.fit.estimate import at
from schedc.planner.fit.predict import predict
from schedc.planner.fit.rows import load_rows
from schedc.planner.model.file import write_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.priced import PricedPlan, price_plan, read_back, step_seconds
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.conditions import read_condition
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.table import RunTable
from schedc.report.priced_plans import plan_facts
from truth.cases import Options, Verdict
from truth.draws import PlanDraw, plan_draws
from truth.shares import in_shares

_CASES, _SHARE = 500, 25
"""Rows of the word, and of one file with one set of constants."""
_EQUAL = 1e-9


def prices(options: Options) -> Verdict:
    """The word `prices`."""
    shares = in_shares(_share, options, _CASES, _SHARE)
    rows = [row for share in shares for row in share]
    failed = tuple(row["row"] for row in rows if row["failed"])
    ways = {way: max(row["off"].get(way, 0.0) for row in rows) for way in _WAYS}
    traits = [trait for row in rows for trait in row["traits"]]
    figures = {
        "largest difference": ways,
        "rows with": {trait: traits.count(trait) for trait in sorted(set(traits))},
        "failures": [row for row in rows if row["failed"]][:20],
    }
    return Verdict(len(rows), failed, figures)


_WAYS = ("predicted", "searched", "file", "printed", "printed bars", "fitted", "predicted memory")


def _share(seed: str, count: int) -> list[dict[str, Any]]:
    """The comparisons of one file of rows."""
    rng = random.Random(seed)
    draws = [*islice(plan_draws(rng), count)]
    constants = draws[0].planned.problem.constants
    plans = [replace(draw.planned.problem, constants=constants) for draw in draws]
    planned = [_under(draw, problem) for draw, problem in zip(draws, plans, strict=True)]
    known = [price_plan(plan) for plan in planned]
    with TemporaryDirectory() as folder:
        predicted = predict(load_rows(_written(known, Path(folder))), dict(constants))
    results = []
    for number, (draw, priced, row) in enumerate(zip(draws, known, predicted, strict=True)):
        plan = priced.planned
        steps = {"predicted": row.step_s, "searched": _searched(draw, plan), "file": _of_file(priced)}
        steps |= _printed(priced)
        if not plan.choice.by_policy:
            runs = RunTable([TrainingRun(plan.problem, plan.axes)])
            steps["fitted"] = float(step_seconds(runs, at(dict(constants)))[0, 0])
        off = {way: abs(step / priced.step - 1.0) for way, step in steps.items()}
        off["predicted memory"] = abs((row.memory_bytes or 0.0) / priced.needed - 1.0)
        wrong = [way for way, share in off.items() if not share <= _EQUAL]
        results.append(
            {"row": f"{seed}:{number}", "failed": wrong, "off": off, "step_s": priced.step, "traits": _traits(plan),
             "axes": str(plan.axes) if wrong else ""}
        )  # fmt: skip
    return results


def _under(draw: PlanDraw, problem: Any) -> PlannedStep:
    table = type(draw.planned.table).of(problem, draw.planned.table.splits)
    return replace(draw.planned, problem=problem, table=table)


def _traits(plan: PlannedStep) -> list[str]:
    """What is rare in a row."""
    problem, axes = plan.problem, plan.axes
    there = {
        "experts": problem.model.moe is not None,
        "pairs": axes.overlap,
        "predictions": problem.model.mtp > 0,
        "tensor ranks": axes.tp > 1,
        "context ranks": axes.cp > 1,
        "expert ranks": axes.ep > 1,
        "policy": plan.choice.by_policy,
        "free steps": problem.stack.free_steps,
        "skew": TrainingRun(problem, axes).skew > 1.0,
        "spread of loads": problem.assumed and axes.ep > 1,
        f"zero {axes.zero}": True,
        f"recompute {axes.recompute} {axes.where}": True,
        f"layout {axes.layout}": True,
        "rails": any(level.rails for level in problem.cluster.levels),
        axes.alltoall: axes.ep > 1,
        axes.schedule: True,
        problem.precision: True,
        **{
            f"stack {name}": value != getattr(type(problem.stack)(), name)
            for name, value in vars(problem.stack).items()
        },
    }
    return [trait for trait, has in there.items() if has]


def _searched(draw: PlanDraw, plan: PlannedStep) -> float:
    """Seconds of the step that a search finds in the part of the space that has the axes of the plan."""
    wanted = {name: int(value) if isinstance(value, bool) else value for name, value in asdict(plan.axes).items()}
    conditions = [read_condition(f"{name} == {value}") for name, value in wanted.items()]
    alone = replace(draw.space, conditions=tuple(conditions), _orders={})
    (best,) = search(alone, plan.problem, SearchOptions(top=2)).plans
    assert best.axes == plan.axes
    return best.step_s


def _of_file(priced: PricedPlan) -> float:
    """Seconds of the step by the compiler's reading of both files, with what stands beside the pipeline."""
    line = read_back(priced.planned).predicted
    free = priced.planned.problem.stack.free_steps
    return float(priced.beside.step_of(float(line.span.max()) if free else line.makespan))


def _printed(priced: PricedPlan) -> dict[str, float]:
    """Seconds of the step as JSON has it, and as its bars add up."""
    facts = json.loads(json.dumps(plan_facts(priced, 1, (), priced.step)))
    bars = sum(bar["seconds"] for bar in facts["waterfall"])
    return {"printed": facts["step_s"], "printed bars": bars}


# Files of rows.


def _written(plans: Sequence[PricedPlan], folder: Path) -> Path:
    """A file of rows that has these plans and measured their prices, beside files of their models and clusters."""
    rows = [
        _cells(plan.planned, number, folder) | {"step_s": repr(plan.step), "peak_gib": plan.needed / 2**30}
        for number, plan in enumerate(plans)
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    path = folder / "rows.csv"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _cells(plan: PlannedStep, number: int, folder: Path) -> dict[str, Any]:
    problem, axes, stack = plan.problem, plan.axes, plan.problem.stack
    model = problem.model
    sizes, cluster = f"{number}.model.toml", f"{number}.cluster.toml"
    (folder / sizes).write_text(write_model(model), encoding="utf-8")
    (folder / cluster).write_text("\n".join(_cluster_lines(problem.cluster)), encoding="utf-8")
    traits = {name: int(value) for name, value in vars(stack).items() if name in COLUMNS}
    own = {
        name: value for name, value in asdict(axes).items() if name in COLUMNS and name not in ("overlap", "recompute")
    }
    return {
        "row_id": number, "model": model.name, "sizes": sizes, "cluster": cluster, "layers": model.layers,
        "hidden": model.hidden, "heads": model.attention.heads, "seq": model.seq, "batch": axes.batch,
        "precision": problem.precision, "skew": repr(TrainingRun(problem, axes).skew), **own, **traits,
        "level": axes.recompute, "cells": int(axes.overlap), "waits": int(not stack.free_steps),
        "recompute": "attention" if stack.recomputes_scores else "none",
    }  # fmt: skip


def _cluster_lines(cluster: Cluster) -> Iterator[str]:
    device = cluster.device
    yield 'schema = "schedc.cluster/1"'
    yield from (f'name = "{cluster.name}"', f"devices = {cluster.devices}", f"per_node = {cluster.per_node}")
    yield from ("[device]", f'name = "{device.name}"', f"peak = {_inline(device.peak)}")
    for name in ("sms", "hbm_bytes", "hbm_Bps", "usable"):
        yield f"{name} = {getattr(device, name)!r}"
    for level in cluster.levels:
        yield "[[level]]"
        yield f'name = "{level.name}"'
        for name in ("size", "alpha_s", "Bps", "nics", "oversubscription"):
            yield f"{name} = {getattr(level, name)!r}"
        yield f"rails = {str(level.rails).lower()}"


def _inline(values: Mapping[str, float]) -> str:
    return "{ " + ", ".join(f"{name} = {value!r}" for name, value in values.items()) + " }"
