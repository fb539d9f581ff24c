"""The axes of a plan give its devices, batch and stages."""

from __future__ import annotations

from dataclasses import replace

from schedc.planner.space.axes import PlanAxes

PLAN = PlanAxes(8, 1, 16, 2, 32, 48, 1, 1, 96, "interleaved_1f1b")


def test_products_of_axes() -> None:
    assert (PLAN.devices, PLAN.batch, PLAN.stages, PLAN.pipeline_rank) == (6144, 4608, 32, 384)


def test_plans_have_an_order() -> None:
    others = [replace(PLAN, overlap=True), replace(PLAN, tp=4, dp=96, microbatches=48)]
    assert sorted([PLAN, *others]) == [others[1], PLAN, others[0]]
