"""Weights of experts in fp8: rounded once in a step and direction, anew when they are written, without a wide copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedc.ir.plan import Products
from schedc_runtime import Pipeline
from schedc_runtime.moe import fp8
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.fp8 import FP8, WEIGHTS, RoundedWeights, rounded_rows
from schedc_runtime.moe.layer import moe_layers
from support.expert_cases import batch_of, compiled, model
from support.runtime_cases import next_token_loss


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The stacks of weights that are rounded inside."""
    stacks: list[Tensor] = []

    def noted(matrix: Tensor) -> fp8.Rounded:
        stacks.extend([matrix] * (matrix.dim() == 3))
        return rounded_rows(matrix)

    with monkeypatch.context() as patch:
        patch.setattr(fp8, "rounded_rows", noted)
        yield stacks


def steps(pipe: Pipeline) -> list[Tensor]:
    """Losses and gradients of steps, between which weights are written: past autograd's versions, too."""
    results: list[Tensor] = []
    for write in (lambda weight: weight.data.mul_(1.5), lambda weight: weight.detach().neg_(), None):
        pipe.zero_grad()
        results.append(pipe.step(*batch_of(pipe.program, pipe.mesh.replicas)))
        results += [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        for parameter in pipe.parameters():
            if write is not None and parameter.dim() == 3:
                write(parameter)
    return results


@pytest.mark.slow
def test_a_step_rounds_each_weight_once_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "  experts 8 top 2 precision fp8 or fallback\n  topology nodes 2 x 1\n"
    program = compiled("1f1b", {"P": 1, "M": 2}, lines)
    pipes = [
        Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, example=batch_of(program, 1)[0])
        for _ in range(2)
    ]
    layers = [layer for stage in pipes[0]._held() for _, layer in moe_layers(stage.module)]
    with counting(monkeypatch) as stacks:
        results = steps(pipes[0])
        assert len(stacks) == 3 * len(layers) * 2 * 2  # steps, two stacks, two directions
        stacks.clear()
        pipes[0].evaluate(*batch_of(program, pipes[0].mesh.replicas))
        assert len(stacks) == len(layers) * 2
    assert not WEIGHTS._kept
    assert not WEIGHTS._homes
    monkeypatch.setattr(RoundedWeights, "_key", lambda *_: None)  # each product rounds
    assert all(map(torch.equal, results, steps(pipes[1])))


@pytest.mark.parametrize("around", [nullcontext, lambda: saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_are_known_through_autocast_and_hooks(
    around: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    experts, rows = Experts(3, 16, 16), torch.randn(9, 16)
    experts.products = Products("quantized")

    def run() -> list[Tensor]:
        leaf = rows.clone().requires_grad_()
        with around(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = experts(leaf, (2, 3, 4))
        output.float().sin().sum().backward()
        assert leaf.grad is not None
        return [output, leaf.grad]

    expected = run()
    with counting(monkeypatch) as stacks:
        with WEIGHTS.step():
            for _ in range(3):
                assert all(map(torch.equal, run(), expected))
            assert len(stacks) == 2 * 2
            with torch.no_grad():
                experts.down.mul_(2)
            assert not torch.equal(run()[0], expected[0])
            assert len(stacks) == 2 * 2 + 2
        run()
        assert len(stacks) == 3 * 2 * 2 - 2


def test_what_is_no_parameter_is_rounded_each_time() -> None:
    weights = torch.randn(2, 16, 16)
    with WEIGHTS.step():
        first, second = WEIGHTS.rounded(weights), WEIGHTS.rounded(weights)
        assert first[0] is not second[0]
        with torch.inference_mode():
            assert WEIGHTS.rounded(nn.Parameter(torch.ones(1, 2, 2)))[0].dtype is FP8
        assert not WEIGHTS._kept


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest number of entries that a result in float32 has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype is torch.float32]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_and_scales_are_those_of_a_wide_copy_which_is_not_made(dtype: torch.dtype) -> None:
    matrix = (torch.randn(3, 33, 24) * torch.logspace(-6, 4, 33)[:, None]).to(dtype)
    matrix[1, 3] = 0
    for each in (matrix, matrix.transpose(1, 2)):
        wide = each.float()
        scale = wide.abs().amax(-1).clamp(min=1e-30) / torch.finfo(FP8).max
        with Wide() as mode:
            numbers, scales = rounded_rows(each)
        assert torch.equal(scales, scale)
        assert torch.equal(numbers.view(torch.uint8), (wide / scale[..., None]).to(FP8).view(torch.uint8))
        assert numbers.is_contiguous()
        assert mode.largest == (matrix.numel() if dtype is torch.float64 else scale.numel())
