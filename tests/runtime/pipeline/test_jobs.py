"""The launch line of a job trains: torchrun starts it with four local processes in place of four devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem
from schedc.report.jobs import job_text
from support.local_jobs import launch_line
from support.paths import ROOT
from support.sweeps import in_sweeps
from support.warm_command import run_torchrun

LOCAL = ROOT / "examples" / "plan_local"


@in_sweeps("compiler/report/test_jobs.py::test_a_job_checks_and_compiles_its_plan_and_starts_the_trainer")
@pytest.mark.processes
def test_the_launch_line_trains_on_four_processes(tmp_path: Path) -> None:
    model, cluster = open_model(str(LOCAL / "model.toml")).at(32), open_cluster(str(LOCAL / "cluster.toml"))
    problem = PlanProblem(model, cluster, 16)
    axes = PlanAxes(1, 1, 2, 1, 2, 2, 1, 2, 4, "1f1b")
    plan = price_plan(PlannedStep(problem, axes, open_choice("1f1b"), PartTable.of(problem, [axes.split])))
    folder, script = tmp_path / "plans", tmp_path / "01.slurm"
    folder.mkdir()
    (folder / "01.sched").write_text(plan.plan_text)
    (folder / "01.costs.toml").write_text(plan.cost_text)
    script.write_text(job_text("slurm", plan, "01", {"schedc": None}) or "")
    words = launch_line(script, folder)
    assert words[:4] == ["--nnodes", "1", "--nproc-per-node", "4"]
    done = run_torchrun([*words, "--steps", "1", "--width", "16", "--tokens", "8"], folder)
    assert done.returncode == 0, done.stderr
    assert "step 1: loss " in done.stdout
