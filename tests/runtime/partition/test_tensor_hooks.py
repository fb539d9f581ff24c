"""Hooks that a forward registers on tensors between units: recorded with the bits of plain autograd, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.ir.plan import Level, Plan, Recompute
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition import partition
from support.sweeps import halved

WIDTH, ROWS = 4, 8
Between = Callable[["Hooked", int, Tensor], Any]


class Block(nn.Module):
    """A residual block of two layers, whose weight gradients can be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Hooked(nn.Module):
    """Blocks; ``between`` is what the forward does to the output of each, by its number."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.strength = nn.Parameter(torch.tensor(0.5))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if torch.is_grad_enabled():  # else torch refuses hooks
                self.between(self, number, x)
            if number == 1:
                kept = x
            if number == 3 and torch.is_grad_enabled():
                self.between(self, -1, kept)  # the output of a block of an earlier stage
        return x + kept * self.strength


def _scale(factor: float, grad: Tensor) -> Tensor:
    return grad * factor


class Reversal:
    """A hook with a state of its own."""

    def __call__(self, grad: Tensor) -> Tensor:
        return -grad


def everywhere(hook: Any) -> Between:
    return lambda _model, _number, x: x.register_hook(hook)


def _with_parameter(model: Hooked, number: int, x: Tensor) -> None:
    x.register_hook(lambda grad: grad * model.strength.detach())  # type: ignore[no-untyped-call]


def _twice(_model: Hooked, number: int, x: Tensor) -> None:
    x.register_hook(lambda grad: grad + number)  # type: ignore[no-untyped-call]
    x.register_hook(lambda grad: grad.clamp(-1, 1) * 3)  # type: ignore[no-untyped-call]


def _removed(_model: Hooked, number: int, x: Tensor) -> None:
    handle = x.register_hook(lambda grad: grad * 0)  # type: ignore[no-untyped-call]
    x.register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]
    handle.remove()


def _of_an_earlier_stage(_model: Hooked, number: int, x: Tensor) -> None:
    if number == -1:
        x.register_hook(lambda grad: grad * grad)  # type: ignore[no-untyped-call]


CASES: dict[str, Between] = {
    "zero": everywhere(lambda grad: grad * 0),
    "partial": everywhere(partial(_scale, 0.3)),
    "object": everywhere(Reversal()),
    "parameter": _with_parameter,
    "two": _twice,
    "removed": _removed,
    "of an earlier stage": _of_an_earlier_stage,
}


def step(between: Between, schedule: str, ranks: int = 2, **options: Any) -> list[str]:
    """What a step of a pipeline has with other bits than plain autograd."""
    torch.manual_seed(0)
    model = Hooked(between).double()
    twin = copy.deepcopy(model)
    program = schedc.compile(schedule, P=ranks, M=4)
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pipe = Pipeline(model, program, loss_fn=_loss, in_process=True, example=rows, **options)
    loss = pipe.step(rows, rows)
    losses = [_loss(twin(part), part) for part in rows.chunk(4)]
    for one in losses:
        (one / 4).backward()
    expected = dict(twin.named_parameters())
    wrong = [] if torch.equal(loss, torch.stack(losses).mean()) else ["loss"]
    wrong += [name for name, p in pipe.named_parameters() if not torch.equal(_grad(p), _grad(expected[name]))]
    evaluated = pipe.evaluate(rows, rows)
    pipe.close()
    return wrong if torch.equal(evaluated, loss) else [*wrong, "evaluate"]


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("case", halved(CASES))
@pytest.mark.parametrize("schedule", halved(["1f1b", "zbv", "dualpipev"]))
def test_hooks_between_units_have_the_bits_of_plain_autograd(schedule: str, case: str) -> None:
    assert step(CASES[case], schedule) == []


@pytest.mark.parametrize("level", [Level.ACT, Level.LAYER])
def test_hooks_are_kept_under_recomputation(level: Level) -> None:
    assert step(_twice, "zbv", plan=Plan(recompute=(Recompute(level),) * 4)) == []


def test_hooks_are_refused_in_segments() -> None:
    with pytest.raises(RuntimeFault, match=r"(?s)gradient of one segment alone.*test_tensor_hooks.py:\d+"):
        step(_twice, "1f1b", cut=Cut(segmented=True))


def _closing_over(_model: Hooked, _number: int, x: Tensor) -> None:
    scale = x.abs().mean()
    x.register_hook(lambda grad: grad * scale)  # type: ignore[no-untyped-call]


REFUSED: dict[str, tuple[Between, str]] = {
    "a tensor of the forward": (_closing_over, "keeps a tensor"),
    "parameter": (lambda model, _, x: model.strength.register_hook(lambda g: g), "`strength` between units"),
    "retain_grad": (lambda _, _n, x: x.retain_grad(), r"`retain_grad\(\)` is called"),
    "grad_fn": (lambda _, _n, x: x.grad_fn.register_hook(lambda *_: None), "on a gradient function"),
    "grad_fn, before": (lambda _, _n, x: x.grad_fn.register_prehook(lambda *_: None), "on a gradient function"),
    "multi": (lambda _, _n, x: torch.autograd.graph.register_multi_grad_hook((x,), print), "gradient function"),
    "backward": (lambda _, _n, x: x.sum().backward(), r"`backward\(\)`"),
    "autograd.backward": (lambda _, _n, x: torch.autograd.backward(x.sum()), r"`torch.autograd.backward\(\)`"),
    "autograd.grad": (lambda m, _n, x: torch.autograd.grad(x.sum(), m.strength), r"`torch.autograd.grad\(\)`"),
    "detach_": (lambda _, _n, x: x.detach_(), r"`detach_\(\)`"),
    "post accumulate": (
        lambda m, _n, x: m.strength.register_post_accumulate_grad_hook(lambda _: None), "register_post_accumulate"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_effects_are_refused_by_their_line(case: str) -> None:
    between, what = REFUSED[case]
    with pytest.raises(RuntimeFault, match=rf"(?s){what}.*test_tensor_hooks.py:\d+: "):
        partition(Hooked(between), 2, example=torch.ones(2, WIDTH))


def test_backward_hooks_of_the_model_itself_are_refused() -> None:
    model = Hooked(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeFault, match="on a gradient function"):
        partition(model, 2, example=torch.ones(2, WIDTH))
