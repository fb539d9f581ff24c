"""One price of a plan: searches, predictions, explanations and written files say the same, to the last bit."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.planner.fit.fitted import fit_for
from schedc.planner.fit.predict import predict
from schedc.planner.fit.rows import load_rows
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.price.waterfall import waterfall
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem, Stack
from schedc.planner.times.skew import LOADS
from support.short_search import short_search
from support.sweeps import swept

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from truth.cases import Options
from truth.prices import prices
from truth.rows import left_out, row_cases

CONSTANTS = {"gemm": 0.71, "launch": 0.9e-3, "ep": 0.43, "hbm": 0.66, "split": 1.07, "dp": 0.5, "chunk": 1.7e-3}

WRITTEN = [
    ("deepseek-v3", "h800", 1, PlanAxes(1, 1, 16, 2, 16, 16, 1, 1, 32, "dualpipev", overlap=True, layout="apart")),
    ("mixtral-8x7b", "h100", 3, PlanAxes(2, 1, 4, 1, 8, 4, 2, 1, 16, "1f1b", 0, "act", "first_half", "balanced")),
    ("llama-3.1-8b", "a100-80", 1, PlanAxes(2, 4, 2, 1, 1, 1, 3, 2, 8, "zbh2", recompute="full")),
]
AS_SEARCHED = {"fused": 1, "sequence_parallel": 1, "overlap": 1, "grad_bytes": 4, "waits": 1, "step_s": 1.0}
"""What the software of a search does, as columns."""
SEARCHED = Stack()


def planned_of(name: str, cluster: str, skew: float, axes: PlanAxes, stack: Stack = SEARCHED) -> PlannedStep:
    problem = PlanProblem(
        open_model(name).at(2048), open_cluster(cluster, axes.devices), axes.batch, CONSTANTS, skew=skew, stack=stack
    )
    return PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split]))


def row_of(planned: PlannedStep, cluster: str, rows: Path, **software: int) -> float:
    """Writes a plan as a row of a file, and gives the predicted step in seconds."""
    model, axes = planned.problem.model, planned.axes
    of_model = {"layers": model.layers, "hidden": model.hidden, "heads": model.attention.heads, "seq": 2048}
    of_axes = {**asdict(axes), "level": axes.recompute, "cells": int(axes.overlap), "batch": axes.batch}
    for column in ("overlap", "recompute", "microbatches"):
        del of_axes[column]
    cells = {"model": model.name, "sizes": model.name, "cluster": cluster, "skew": planned.problem.skew}
    cells |= {**of_model, **of_axes, **AS_SEARCHED, **software}
    rows.write_text(f"{','.join(cells)}\n{','.join(map(str, cells.values()))}\n", encoding="utf-8")
    (row,) = predict(load_rows(rows), CONSTANTS)
    return row.step_s


@pytest.mark.parametrize(("name", "cluster", "skew", "axes"), WRITTEN, ids=lambda value: str(value)[:12])
def test_a_row_says_all_of_a_plan(name: str, cluster: str, skew: float, axes: PlanAxes, tmp_path: Path) -> None:
    planned, rows = planned_of(name, cluster, skew, axes), tmp_path / "rows.csv"
    assert row_of(planned, cluster, rows) == price_plan(planned).step
    layers = planned.problem.model.layers
    rows.write_text(rows.read_text(encoding="utf-8").replace(f",{layers},", ",9,"), encoding="utf-8")
    with pytest.raises(DiagnosticError, match="S723"):
        load_rows(rows)


def test_a_row_says_whether_ranks_wait(tmp_path: Path) -> None:
    """Without a wait the step of zbh2 is that of its busiest rank. Ranks of other schedules wait in any row."""
    name, cluster, skew, axes = WRITTEN[2]
    assert axes.schedule == "zbh2"
    waiting = planned_of(name, cluster, skew, axes)
    free = planned_of(name, cluster, skew, axes, replace(SEARCHED, free_steps=True))
    rows = tmp_path / "rows.csv"
    steps = [row_of(waiting, cluster, rows, waits=waits) for waits in (1, 0)]
    assert steps == [price_plan(waiting).step, price_plan(free).step]
    assert steps[1] < steps[0]
    row_of(planned_of(name, cluster, skew, replace(axes, schedule="1f1b")), cluster, rows, waits=0)
    assert load_rows(rows).rows[0].run.problem.stack == SEARCHED


PUBLISHED = Path(__file__).parents[4] / "benchmarks" / "published"
EMPTY = "a stage without layers has the embedding or the head alone"
RARE = {
    "pairs",
    "predictions",
    "context ranks",
    "tensor ranks",
    "expert ranks",
    "policy",
    "experts",
    "zero 3",
    "layout ends",
}


@pytest.mark.sweep
@pytest.mark.slow
@short_search()
def test_rows_searches_files_bars_and_fits_have_one_price() -> None:
    count, seed = swept((60, 1), (12, 36))
    verdict = prices(Options(count, seed))
    assert (verdict.cases, verdict.failed) == (count, ()), verdict.figures["failures"]
    assert verdict.figures["rows with"].keys() >= RARE | {"spread of loads"}


@pytest.mark.slow
def test_a_published_row_on_a_domain_with_idle_devices_is_a_plan() -> None:
    """GPT-OSS-120B with EP 64 on 64 devices of domains of 72: a search finds what `--predict` says, to the last bit."""
    measured = load_rows(PUBLISHED / "mbridge_26_04_01.csv")
    rows = [row for row in measured.rows if row.run.model.name == "GPT-OSS-120B" and row.run.axes.ep == 64]
    assert {(row.run.cluster.levels[0].size, row.run.axes.devices) for row in rows} >= {(72, 64)}
    cases = row_cases(replace(measured, rows=tuple(rows)))
    assert [(case.reason, case.off) for case in cases] == [("", 0.0)] * len(rows)


LEFT_OUT = {
    "zerobubble_t4": {
        "microbatch 6: only powers of two are tried",
        "microbatch 3: only powers of two are tried",
        EMPTY,
    },
    "mbridge_26_04": {"vpp 12: no space has more than 8 stages of a rank", EMPTY},
    "mindspeed_rc2": set(),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_published_rows_are_plans_or_a_rule_leaves_them_out(name: str) -> None:
    runs = {row.name: row.run for row in load_rows(PUBLISHED / f"{name}.csv").rows}
    reasons = {row: left_out(run) for row, run in runs.items()}
    assert {*reasons.values()} - {""} == LEFT_OUT[name]
    for row, reason in reasons.items():
        model, axes = runs[row].model, runs[row].axes
        assert (axes.stages > model.layers) == (reason == EMPTY) or reason.startswith(("microbatch", "vpp"))


EXPLAINED = [
    ("gpt2", 8, "32x1024", "pp == 4 and zero == 1 and microbatch == 2 and schedule in 1f1b, zbh1", "schedule=zbh1"),
    ("llama-3.1-8b", 16, "32x4096", "pp == 4 and tp == 2 and zero == 2 and schedule in 1f1b, zbh1", "recompute=full"),
    (
        "qwen3-30b-a3b",
        16,
        "16x4096",
        "pp == 2 and tp == 1 and ep == 8 and zero == 1 and recompute == none and schedule == dualpipev",
        "overlap=1",
    ),
]
"""Model, devices, batch, conditions of a space and axes of a plan of it."""


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "devices", "batch", "space", "plan"), swept(EXPLAINED, EXPLAINED[-1:]), ids=lambda value: str(value)[:12]
)
@short_search()
def test_the_command_explains_the_price(name: str, devices: int, batch: str, space: str, plan: str) -> None:
    """`schedc plan ... --explain` says step, memory and bars of `price_plan`, and so does the plan that it lists."""
    require = f"layout == even and microbatch <= 2 and {space}"
    command = ["plan", name, "h100", "-D", f"devices={devices}", "--batch", batch, "--require", require]
    ran = CliRunner().invoke(main, [*command, "--explain", plan, "--top", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    explained = json.loads(ran.stdout)["explain"]
    sequences, seq = map(int, batch.split("x"))
    cluster = open_cluster("h100", devices)
    fit = fit_for(cluster, "bf16", None, False)
    model, constants = open_model(name).at(seq), fit.constants if fit else {}
    problem = PlanProblem(model, cluster, sequences, constants, spread=LOADS if model.moe else 0.0)
    axes = PlanAxes(**explained["axes"])
    priced = price_plan(PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split])))
    assert (explained["step_s"], explained["needed_bytes"]) == (priced.step, priced.needed)
    assert explained["waterfall"] == [bar._asdict() for bar in waterfall(priced)]
