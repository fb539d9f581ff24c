"""Models that ask torch for its modes, between units and inside of them: a recording takes the branch of its call."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline


def asked() -> float:
    """Another factor in every mode."""
    factor = 3.0 if torch.is_grad_enabled() else 1.0
    factor *= 5.0 if torch.is_inference_mode_enabled() else 1.0
    return factor * (7.0 if torch.is_autocast_enabled("cpu") else 1.0)


class Inside(nn.Module):
    """A unit that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + asked() * torch.tanh(self.linear(x))


class Between(nn.Module):
    """Asks between its units, without and with a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inside() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = asked() * torch.tanh(block(x)) + (0.0 if self.training else 1.0)
            with torch.no_grad():
                shift = asked() * x.mean(1, keepdim=True)
            x = x - shift
        return x


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def around(mode: str) -> AbstractContextManager[object]:
    if mode == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "plain": torch.enable_grad}[mode]()


@pytest.mark.slow
@pytest.mark.parametrize("built_in", ["plain", "no_grad"])
def test_a_call_is_recorded_in_its_own_modes(built_in: str) -> None:
    """Steps and evaluations take turns: what was recorded in one mode does not run in another."""
    torch.manual_seed(0)
    model = Between().double()
    whole = copy.deepcopy(model)
    rows, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    with around(built_in):
        program = schedc.compile("1f1b", P=2, M=4)
        pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=rows)
    for mode in ("plain", "no_grad", "inference_mode", "autocast", "plain"):
        whole.eval()
        with around(mode), torch.no_grad():
            expected = squares(whole(rows), targets)
            torch.testing.assert_close(pipe.evaluate(rows, targets), expected, rtol=1e-12, atol=0, msg=mode)
        whole.train()
        with around("autocast" if mode == "autocast" else "plain"):
            expected = squares(whole(rows), targets)
            torch.testing.assert_close(pipe.step(rows, targets), expected.detach(), rtol=1e-12, atol=0, msg=mode)
