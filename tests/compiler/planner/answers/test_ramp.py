"""A ramp of batch sizes: each size priced as a search prices it, or named, and days that are sums of its steps."""

from __future__ import annotations

import json
from math import ceil

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.planner.answers.budget import TrainingAsked, training_budget
from schedc.planner.answers.ramp import RampAsked, RampStep, ramp_steps
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from support.written_plans import GPT2

SEARCH = ("plan", "gpt2", "h100", "-D", "devices=8", "--require", "pp == 2 and dp == 4 and microbatch == 1", "--json")
SEARCH = (*SEARCH, "--require", "recompute == none and schedule in 1f1b, zbh1", "--top", "40", "--draws", "off")

FAILING = ("--tokens", "10M", "--restart", "600")


def plan_of(schedule: str, vpp: int) -> PricedPlan:
    """A plan of 16 sequences with two pipeline ranks and four replicas."""
    axes = PlanAxes(1, 1, 2, vpp, 1, 4, 1, 1, 4, schedule=schedule)
    return price_plan(PlannedStep(GPT2, axes, open_choice(schedule), PartTable.of(GPT2, [axes.split])))


def searched(*options: str) -> dict[str, object]:
    result = CliRunner().invoke(main, [*SEARCH, *options])
    assert result.exit_code == 0, result.output
    facts: dict[str, object] = json.loads(result.stdout)
    return facts


@pytest.mark.slow
def test_a_size_takes_what_a_search_says_of_it() -> None:
    ramped = searched("--batch", "16x1024", "--tokens", "10M", "--ramp", "8:16:4@2M")["plans"]
    assert isinstance(ramped, list)
    alone = {8: searched("--batch", "8x1024")["plans"], 12: searched("--batch", "12x1024")["plans"]}
    compared = 0
    for plan in ramped:
        axes = plan["axes"]
        for size in plan["budget"]["ramp"]:
            wanted = axes | {"microbatches": size["sequences"] // 4}
            same = [each["step_s"] for each in alone[size["sequences"]] if each["axes"] == wanted]
            compared += len(same)
            assert [size["step_s"]] * len(same) == same
    assert compared >= 3


def test_sizes_that_a_plan_cannot_take_are_named_and_trained_in_larger_steps() -> None:
    plan = plan_of("interleaved_1f1b", 2)
    asked = RampAsked(6, 16, 2, 100 * 1024 * 5)
    steps = ramp_steps(asked, plan)
    assert [each.sequences for each in steps] == [6, 8, 10, 12, 14]
    reasons = {each.sequences: each.reason for each in steps}
    assert reasons[8] is None
    assert reasons[6] == reasons[10] == "no multiple of dp * microbatch = 4"
    for each in steps:
        assert (each.step_s is None) == (each.reason is not None)
        assert each.steps == ceil(100 * 1024 / (each.taken * 1024))
        assert each.taken == min(size for size in (8, 12, 16) if size >= each.sequences and not reasons.get(size))
    (named,) = ramp_steps(RampAsked(12, 16, 4, 1e6), plan_of("interleaved_overlap", 2))
    assert named.reason == "interleaved_overlap does not take these microbatches on 2 ranks of 2 stages"
    assert named.taken == 16


def test_days_of_a_run_are_those_of_its_steps() -> None:
    day = 86_400.0
    ramp = (RampStep(4, 100, 2.0, None, 4), RampStep(8, 50, None, "no", 12), RampStep(12, 40, 5.0, None, 12))
    tokens = 1024 * (4 * 100 + 12 * 90 + 16 * 1000)
    asked = TrainingAsked(tokens, price=2.0)
    budget = training_budget(asked, GPT2, 7.0, 8, 8, ramp)
    assert budget.steps == 100 + 50 + 40 + 1000
    assert budget.days == pytest.approx((200 + 90 * 5.0 + 7000.0) / day)
    assert budget.ramp_days == pytest.approx((200 + 90 * 5.0) / day)
    assert budget.tokens_per_day == pytest.approx(tokens / budget.days)
    assert budget.cost == pytest.approx(2.0 * 8 * 24 * budget.days)
    assert budget.cost_per_million == pytest.approx(budget.cost / tokens * 1e6)
    failing = TrainingAsked(tokens, mtbf_hours=50.0, checkpoint_s=10.0, restart_s=60.0)
    lost = training_budget(failing, GPT2, 7.0, 8, 8, ramp)
    assert lost.days == pytest.approx(budget.days / lost.goodput)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ramp", "8:16@1M"), "--ramp is about a training run: add --tokens"),
        (("--tokens", "10M", "--ramp", "16:8@1M"), "is no ramp; write first and last sequences"),
        (("--tokens", "10M", "--ramp", "8:16@none"), "is no ramp; write first and last sequences"),
        (("--tokens", "10M", "--ramp", "6:16:4@1M"), "add one that does: 6:16:2@1M"),
        (("--tokens", "10M", "--ramp", "1:16384:1@1M"), "write a larger increment"),
        (("--tokens", "10M", "--ramp", "8:32@1M"), "end it at the batch: --ramp 8:16@1e+06"),
        (("--tokens", "10M", "--ramp", "8:16@20M"), "write fewer tokens behind the @"),
        (("--tokens", "10M", "--ramp", "4:16@30K"), "write more tokens behind the @"),
        (("--tokens", "10K"), "--tokens counts the tokens of the whole run"),
        (("--tokens", "10M", "--price", "0"), "write what a device costs in an hour, or leave --price out"),
        (("--tokens", "10M", "--price", "nan"), "write what a device costs in an hour, or leave --price out"),
        (("--tokens", "10M", "--watts", "-3"), "write the watts of a device, or leave --watts out"),
        ((*FAILING, "--mtbf", "1", "--checkpoint", "60"), "--mtbf is the mean time between"),
        ((*FAILING, "--mtbf", "9", "--checkpoint", "-1"), "write the seconds of a checkpoint"),
    ],
)  # fmt: skip
def test_what_no_run_can_be_is_refused_with_a_remedy(options: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, [*SEARCH, "--batch", "16x1024", *options])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())
