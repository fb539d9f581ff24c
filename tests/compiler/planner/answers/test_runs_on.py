"""Which software runs a plan: as `schedc export` writes or refuses its files, and as a pipeline takes its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.planner.answers.runs_on import runs_on
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.report.plans import not_run_texts, plan_table
from support.plan_facts import plan_facts
from support.written_plans import GPT2

ONE = PlanAxes(1, 1, 2, 1, 1, 4, 1, 1, 4, "1f1b")
CASES: list[tuple[PlanAxes, tuple[str, str, str]]] = [
    (ONE, ("", "", "")),
    (replace(ONE, tp=2, dp=2, microbatches=8), ("", "", "")),
    (replace(ONE, cp=2, dp=2, microbatches=8), ("", "", "")),
    (
        replace(ONE, cp=2, dp=2, zero=3, microbatches=8),
        ("cp 2 and zero 3", "Megatron has no zero 3 in a pipeline", "it holds gathered parameters"),
    ),
    (
        replace(ONE, zero=2),
        (
            "zero 2",
            "Megatron has no zero 2 in a pipeline: its distributed optimizer",
            "torchtitan has no zero 2",
        ),
    ),
    (
        replace(ONE, zero=3),
        ("", "Megatron has no zero 3 in a pipeline", "it holds gathered parameters"),
    ),
    (replace(ONE, recompute="layer"), ("", "", "")),
    (
        replace(ONE, recompute="act"),
        ("", "Megatron does not recompute `act`", "it recomputes whole layers"),
    ),
    (replace(ONE, schedule="zbh1"), ("", "order of zbh1: op 2 of rank 0 is", "")),
    (replace(ONE, pp=4, dp=2, microbatch=4, microbatches=2), ("", "", "")),
    (replace(ONE, pp=1, dp=8, microbatches=2), ("", "", "cannot run 1f1b: it pipelines from two ranks on")),
    (replace(ONE, schedule="zbv", vpp=2, tp=2, dp=2, zero=0, microbatches=8), ("", "stages lie otherwise", "")),
]


def priced(axes: PlanAxes) -> PricedPlan:
    return price_plan(PlannedStep(GPT2, axes, open_choice(axes.schedule), PartTable.of(GPT2, [axes.split])))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "reasons"), CASES)
def test_each_software_has_its_own_rules(axes: PlanAxes, reasons: tuple[str, str, str], tmp_path: Path) -> None:
    """The rules of megatron-core and torchtitan are those of `schedc export` for the plan's file."""
    plan = priced(axes)
    software = runs_on(plan)
    assert list(software) == ["schedc", "megatron-core", "torchtitan"]
    for reason, words in zip(software.values(), reasons, strict=True):
        assert reason is None if not words else words in str(reason)
    path = tmp_path / "planned.sched"
    path.write_text(plan.plan_text)
    for name, target in (("megatron-core", "megatron"), ("torchtitan", "torchtitan")):
        result = CliRunner().invoke(main, ["export", str(path), "--to", target])
        assert (result.exit_code == 0) == (software[name] is None), result.output
        assert result.exit_code in (0, 1)


def test_the_table_names_who_runs_a_plan_and_why_others_do_not() -> None:
    all_three = dict.fromkeys(("schedc", "megatron-core", "torchtitan"))
    first = plan_facts(1) | {"runs_on": all_three}
    second = plan_facts(2) | {"runs_on": {"schedc": "a", "megatron-core": "b", "torchtitan": "c"}}
    lines = list(plan_table([first, second]))
    assert "runs on" in lines[0]
    assert ["schedc, mcore, titan" in lines[1], "  none  " in lines[2]] == [True, True]
    assert list(not_run_texts([first, second])) == [
        "schedc does not run 02: a",
        "megatron-core does not run 02: b",
        "torchtitan does not run 02: c",
    ]
    assert list(not_run_texts([second, second])) == [
        "schedc does not run any of them: a",
        "megatron-core does not run any of them: b",
        "torchtitan does not run any of them: c",
    ]
    assert any(line.endswith("runs on schedc, mcore, titan") for line in plan_table([first, first]))
    assert not list(not_run_texts([first, plan_facts(2)]))
