"""A plan beside the model that it is carried out on: sizes of experts, shared ones, types and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import schedc
import schedc_runtime
from schedc.ir.plan import BlockSizes, Host, Offload
from schedc.plan import ExpertSizes, Plan
from schedc.plan.writer import write_plan
from schedc_runtime import Pipeline
from schedc_runtime.errors import PlanMismatch, RuntimeFault
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.pipeline.agree.plan_fit import check_model

H, F, TOKENS = 6, 5, 4
SIZES = ExpertSizes(8, 2, groups=4, limit=2, shared=2, width=F, hidden=H)
FITTING = Plan(SIZES, tokens=TOKENS, dtype="fp32")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        routing = RouterConfig(8, 2, groups=4, limit=2)
        self.layers = nn.ModuleList(
            [nn.Linear(H, H), MoELayer(Router(H, routing), Experts(8, H, F), GatedMLP(H, 2 * F))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def pipeline(plan: Plan, model: nn.Module | None = None) -> Pipeline:
    program, loss_fn = schedc.compile("1f1b", P=2, M=2), nn.functional.mse_loss
    example = torch.zeros(2, 3, H)
    return Pipeline(model or Model(), program, loss_fn=loss_fn, plan=plan, in_process=True, example=example)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"count": 16}, "experts 16; `layers.1` of the model has experts 8"),
        ({"top": 4}, "top 4; `layers.1` of the model has top 2"),
        ({"groups": 2, "limit": 1}, "groups 2, limit 1; `layers.1` of the model has groups 4, limit 2"),
        ({"groups": 1, "limit": 1}, "groups 1, limit 1; `layers.1` of the model has groups 4, limit 2"),
        ({"limit": 3}, "limit 3; `layers.1` of the model has limit 2"),
        ({"shared": 1}, "shared 1; `layers.1` of the model has shared 2"),
        ({"width": 7}, "width 7; `layers.1` of the model has width 5"),
        ({"hidden": 9, "width": 7}, "width 7, hidden 9; `layers.1` of the model has width 5, hidden 6"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused(sizes: dict[str, int], says: str) -> None:
    plan = replace(FITTING, experts=replace(SIZES, **sizes))
    with pytest.raises(PlanMismatch) as caught:
        pipeline(plan)
    line = write_plan(plan).split("  ")[0]
    assert line.startswith("experts ")
    assert caught.value.message == f"the plan says `{line}`: {says}"
    assert "write the model's numbers into the plan" in caught.value.help


class Dense(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(H, inner), nn.GELU(), nn.Linear(inner, H))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize(
    ("hidden", "inner", "says"),
    [
        (H, 7, r"inner 7; `0\.mlp` of the model has inner 9"),
        (H, H, r"inner 6; `0\.mlp` of the model has inner 9"),
        (8, 9, r"hidden 8; `0\.mlp` of the model has hidden 6 or 9"),
        (8, 7, r"hidden 8, inner 7; `0\.mlp` of the model has hidden 6 or 9, inner 6 or 9"),
    ],
)
def test_columns_of_dense_mlps_are_compared(hidden: int, inner: int, says: str) -> None:
    plan = Plan(block=BlockSizes(heads=2, inner=inner, hidden=hidden))
    with pytest.raises(PlanMismatch, match=says):
        check_model(nn.Sequential(Dense(9)), plan)
    check_model(nn.Sequential(Dense(9)), Plan(block=BlockSizes(heads=2, inner=9, hidden=H)))


def test_columns_of_gpts_own_products_are_compared() -> None:
    class Conv1D(nn.Module):
        """What Transformers' class of this name says of itself."""

        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx

    dense = Dense(9)
    dense.mlp = nn.Sequential(Conv1D(9, H), nn.GELU(), Conv1D(H, 9))
    with pytest.raises(PlanMismatch, match=r"inner 7; `0\.mlp` of the model has inner 9"):
        check_model(nn.Sequential(dense), Plan(block=BlockSizes(heads=2, inner=7, hidden=H)))


def test_a_deferred_model_is_compared_as_well() -> None:
    with schedc_runtime.deferred():
        model = Model()
    with pytest.raises(PlanMismatch, match=r"dtype bf16; `layers.1` of the model has dtype fp32"):
        pipeline(replace(FITTING, dtype="bf16"), model)
    pipeline(FITTING, model)


def test_rows_under_autocast_have_its_type() -> None:
    plan = replace(FITTING, dtype="bf16")
    with pytest.raises(PlanMismatch, match=r"`tokens 4 dtype bf16`: dtype bf16;.*dtype fp32(.|\n)*under autocast"):
        pipeline(plan)
    with torch.autocast("cpu", torch.bfloat16):
        pipeline(plan)


def test_tokens_are_those_of_the_first_batch_of_training() -> None:
    """An evaluation of another size says nothing; a batch that is refused leaves the pipeline usable."""
    pipe = pipeline(FITTING)
    pipe.evaluate(torch.randn(2, 7, H), torch.randn(2, 7, H))
    for rows, length, tokens in ((2, 3, 3), (2, 7, 7), (8, 4, 16)):
        with pytest.raises(PlanMismatch, match=f"`tokens 4 dtype fp32`, and `layers.1` .* gets {tokens} tokens"):
            pipe.step(torch.randn(rows, length, H), torch.randn(rows, length, H))
    for rows, length in ((2, 4), (4, 3)):  # the first one fits, and later ones may have any size
        pipe.step(torch.randn(rows, length, H), torch.randn(rows, length, H))


def test_what_a_plan_does_not_say_is_in_the_report() -> None:
    pipe = pipeline(Plan(ExpertSizes(8, 2, groups=4, limit=2)))
    assert pipe.report().splitlines()[1:] == [
        "plan: the experts' width is not said: what follows from it is not known; the model has 5",
        "plan: the experts' hidden is not said: what follows from it is not known; the model has 6",
        "plan: shared experts are not said, and counted as 0; the model has 2",
        "plan: tokens of a microbatch are not said; bytes and times of rows are not known",
        "plan: the dtype is not said, and counted as bf16; the model has fp32",
    ]
    assert "plan:" not in pipeline(FITTING).report()


def test_an_offload_whose_moves_the_program_has_not_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="compiled without it") as fault:
        pipeline(replace(FITTING, host=Host(2e11, 5e10, 5e10), offload=(Offload("all"),)))
    assert "compile that" in fault.value.help
