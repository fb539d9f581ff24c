"""Training runs as rows have them: software without sequence parallelism whose sums of gradients hide nowhere."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import PlanAxes
from schedc.planner.times.problem import PlanProblem, Stack, TrainingRun

ROW = Stack(sequence_parallel=False, overlap=False, grad_bytes=2)
AXES = PlanAxes(1, 1, 1, 1, 1, 1, 0, 1, 1, "1f1b")


def run_of(model: ModelSizes, cluster: Cluster, precision: str = "bf16", **given: Any) -> TrainingRun:
    """A run. given: axes of its plan and traits of its software, by name; pairs: whether exchanges run beside them."""
    of_plan = {field.name for field in fields(PlanAxes)} - {"overlap"}
    pairs = given.pop("pairs", False)
    axes = replace(AXES, **{name: value for name, value in given.items() if name in of_plan}, overlap=pairs)
    stack = replace(ROW, **{name: value for name, value in given.items() if name not in of_plan})
    return TrainingRun(PlanProblem(model, cluster, axes.batch, precision=precision, stack=stack), axes)
