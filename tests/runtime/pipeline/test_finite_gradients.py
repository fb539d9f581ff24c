"""Gradients that are not finite: refused by their own step, with the stage, unless the trainer skips such updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import NonFiniteGradients, NonFiniteLoss, RuntimeFault
from schedc_runtime.pipeline.step import losses
from support.simulated_cases import squares

NAN, INF = float("nan"), float("inf")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.nothing.sum()


class Case:
    """A pipeline of two ranks, with data."""

    def __init__(self, schedule: str = "1f1b", microbatches: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        program = schedc.compile(schedule, P=2, M=microbatches)
        self.model = nn.Sequential(*[Block() for _ in range(program.stages)])
        self.pipe = Pipeline(self.model, program, loss_fn=squares, in_process=True, **options)
        self.data = torch.randn(8, 4), torch.randn(8, 4)

    def backward(self, stage: int, factor: float) -> Callable[[], None]:
        """Multiply the gradient of the output of ``stage``; returns what ends that."""

        def multiply(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * factor)

        return self.model[stage].register_forward_hook(multiply).remove


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1", "dualpipev", "dualpipe"])
def test_the_step_that_makes_a_bad_gradient_refuses_it(schedule: str) -> None:
    case = Case(schedule, microbatches=8 if schedule.startswith("dual") else 4)
    stages = len(case.model)
    case.pipe.step(*case.data)
    for stage, factor in ((0, NAN), (stages - 1, INF)):
        case.pipe.zero_grad()
        end = case.backward(stage, factor)
        with pytest.raises(NonFiniteGradients) as caught:
            case.pipe.step(*case.data)
        assert (caught.value.stage, case.pipe.steps) == (stage, 1)
        assert caught.value.names == sorted(f"{stage}.{name}" for name, p in case.model[stage].named_parameters()
                                            if p.numel())  # fmt: skip
        assert ("earlier stages have such gradients, too" in caught.value.message) == (stage > 0)
        ranks = case.pipe.program.placement.rank_of_stage[:, stage]
        assert f"stage {stage}, on {' and '.join(f'rank {rank}' for rank in sorted(set(ranks.tolist())))}\n" in str(
            caught.value
        )
        end()
    case.pipe.zero_grad()
    case.pipe.step(*case.data)
    assert case.pipe.steps == 2
    assert all(bool(p.grad.isfinite().all()) for p in case.pipe.parameters() if p.grad is not None)


def test_a_weight_gradient_alone_is_a_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not travel. The number that finds it costs no further wait for the device."""
    case, copies, copy_of = Case("zbh1"), list[int](), losses.HostCopy
    monkeypatch.setattr(losses, "HostCopy", lambda tensor: copies.append(tensor.numel()) or copy_of(tensor))
    case.pipe.step(*case.data)
    assert len(copies) == 1
    weight = case.model[1].up.weight
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), INF))
    with pytest.raises(NonFiniteGradients) as caught:
        case.pipe.step(*case.data)
    assert len(copies) == 2
    assert caught.value.names == ["1.up.weight"]
    assert str(caught.value).startswith(
        "a gradient is NaN or infinite: that of `1.up.weight`, stage 1, on rank 1\n"
        "  made at one of 4 instructions from 1W0 on --> zbh1.sched:"
    )
    assert 'Pipeline(check_finite="loss")' in caught.value.help


def test_one_microbatch_is_named() -> None:
    case = Case(microbatches=1)
    case.backward(1, NAN)
    with pytest.raises(NonFiniteGradients, match=r"\n  made at 1B0 --> 1f1b.sched:\d+"):
        case.pipe.step(*case.data)


def test_the_forward_is_named_where_it_was_bad() -> None:
    case = Case()
    with pytest.raises(NonFiniteLoss):
        case.pipe.step(case.data[0] * NAN, case.data[1])


def test_large_numbers_are_finite() -> None:
    """The sum of their norms is not. The largest of float32 is 3.4e38."""
    case = Case()
    case.backward(1, 1e30)
    case.pipe.step(*case.data)
    assert max(float(p.grad.abs().max()) for p in case.pipe.parameters() if p.grad is not None and p.numel()) > 1e25


def test_calls_of_an_update_are_judged_one_by_one() -> None:
    case = Case()
    case.pipe.step(*case.data, accumulate=3)
    end = case.backward(1, NAN)
    with pytest.raises(NonFiniteGradients):
        case.pipe.step(*case.data, accumulate=3)
    end()


def test_who_skips_updates_is_left_alone() -> None:
    """A gradient scaler has a scale, which may pass 1 later. Other trainers say so."""
    case, told = Case(), Case(check_finite="loss")
    for each in (case, told):
        each.backward(0, NAN)
    case.pipe.step(*case.data, scale=2.0)
    case.pipe.step(*case.data, scale=1.0)
    told.pipe.step(*told.data)
    with pytest.raises(NonFiniteLoss):
        told.pipe.step(told.data[0] * NAN, told.data[1])
    assert not Case(check_finite=False).pipe.step(case.data[0] * NAN, case.data[1]).isfinite()
    with pytest.raises(RuntimeFault, match=r"check_finite='no'\)\n.*True, False or \"loss\""):
        Case(check_finite="no")


def test_a_part_that_came_after_the_pipeline_was_built_is_looked_at_too() -> None:
    """The check walks modules as they are at each step: shared parts once, absent ones not at all."""
    case = Case()
    inner = case.pipe.modules[0].get_submodule("0")
    inner.later = nn.Linear(4, 4)
    inner.later.again = inner.up
    inner.later.register_module("absent", None)
    inner.later.weight.grad = torch.full((4, 4), NAN)
    with pytest.raises(NonFiniteGradients, match=r"later\.weight"):
        case.pipe.step(*case.data)


def test_sparse_gradients_are_looked_at_by_their_values() -> None:
    """Beside dense gradients, which are taken as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), Block())
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=4), loss_fn=squares, in_process=True)
    rows, targets = torch.randint(0, 8, (8,)), torch.randn(8, 4)
    pipe.step(rows, targets)
    grad = model[0].weight.grad
    assert grad is not None
    assert grad.is_sparse
    model[0].weight.register_hook(lambda gradient: gradient * NAN)  # type: ignore[union-attr, operator]
    with pytest.raises(NonFiniteGradients, match=r"0\.weight"):
        pipe.step(rows, targets)
    pipe.close()
