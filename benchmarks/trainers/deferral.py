"""Measures which share of the parameters waits for W, and compares I + W with autograd's own backward bit by bit.

share       elements of the parameters without a gradient after I whose gradient W computes, over all elements. A
            gradient that I computes and W only adds does not count.
bitwise     whether all gradients of two accumulated microbatches equal those of ``.backward()``, inputs included
hooks_in_w  how often the hook behind a weight's addition fires for one microbatch: once, and in W

Cases beyond the first are tiny models of Hugging Face families, whose narrow layers have a larger share of norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.stage.split import SplitBackward
from trainers.deferral_families import cases as families
from trainers.split_models import Decoder, InProjection

WIDTH = 32


def _decoder() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, WIDTH), *[Decoder(WIDTH) for _ in range(2)], nn.Linear(WIDTH, 64, bias=False))


def _moe() -> nn.Module:
    layers = [MoELayer(Router(WIDTH, RouterConfig(8, 2)), Experts(8, WIDTH, 3 * WIDTH)) for _ in range(2)]
    return nn.Sequential(nn.LayerNorm(WIDTH), *layers, nn.Linear(WIDTH, WIDTH))


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32),
        nn.ConvTranspose2d(32, 8, 3),
    )  # fmt: skip


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], torch.dtype | None]
CASES: dict[str, Case] = {
    "dense": (_decoder, lambda: torch.randint(0, 64, (2, 16)), None),
    "dense_autocast": (_decoder, lambda: torch.randint(0, 64, (2, 16)), torch.bfloat16),
    "moe": (_moe, lambda: torch.randn(64, WIDTH), None),
    "convolution": (_convolution, lambda: torch.randn(2, 3, 16, 16), None),
    "encoder_layer": (_encoder_layer, lambda: torch.randn(2, 16, WIDTH), None),
    "in_proj": (lambda: InProjection(WIDTH), lambda: torch.randn(2, 16, WIDTH), torch.bfloat16),
}
"""By name: the model, an input, and the type of autocast."""


def measure() -> dict[str, Any]:
    """The figures of all cases."""
    torch.set_num_threads(1)
    cases = [{"case": name, **_case(*case)} for name, case in (CASES | families()).items()]
    return {
        "share": {case["case"]: case["share"] for case in cases},
        "bitwise": all(case["bitwise"] for case in cases),
        "hooks_in_w": max(case["hooks_in_w"] for case in cases)
        if all(case["hooks_in_w"] == 1 for case in cases)
        else 0,
        "cases": cases,
    }


def _loss(model: nn.Module, x: Tensor, autocast: torch.dtype | None) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output = model(leaf)
    return leaf, output.float().sin().sum()


def _case(make: Callable[[], nn.Module], sample: Callable[[], Tensor], autocast: torch.dtype | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    inputs = [sample(), sample()]
    input_grads = []
    for x in inputs:
        leaf, loss = _loss(plain, x, autocast)
        loss.backward()  # type: ignore[no-untyped-call]
        input_grads.append(leaf.grad)
    split = SplitBackward()
    equal = []
    for key, x in enumerate(inputs):
        leaf, loss = _loss(model, x, autocast)
        split.backward(key, [get_gradient_edge(loss)], [torch.ones_like(loss)])
        equal.append(_same(leaf.grad, input_grads[key]))
    share = _share(model, split)
    for key in range(len(inputs)):
        split.weight(key)
    names = [name for name, parameter in model.named_parameters()]
    equal += [_same(model.get_parameter(name).grad, plain.get_parameter(name).grad) for name in names]
    hooks = _hooks(model, inputs[0], autocast)
    return {"share": round(share, 4), "bitwise": all(equal), "gradients": len(equal), "hooks_in_w": hooks}


def _share(model: nn.Module, split: SplitBackward) -> float:
    """The share of the elements of parameters whose gradients are neither there nor computed."""
    computed = {id(later.leaf.parameter) for pending in split.pending.values() for later in pending.later}
    parameters: Sequence[nn.Parameter] = list(model.parameters())
    waiting = sum(p.numel() for p in parameters if p.grad is None and id(p) not in computed)
    return waiting / sum(p.numel() for p in parameters)


def _hooks(model: nn.Module, x: Tensor, autocast: torch.dtype | None) -> int:
    """How often hooks fire in W: the same number for every parameter; 0 if numbers differ or a hook fires in I."""
    calls: dict[str, int] = {name: 0 for name, parameter in model.named_parameters() if parameter.grad is not None}

    def hook(name: str) -> Callable[[Tensor], None]:
        return lambda _: calls.update({name: calls[name] + 1})

    for name in calls:
        model.get_parameter(name).register_post_accumulate_grad_hook(hook(name))
    split = SplitBackward()
    _, loss = _loss(model, x, autocast)
    split.backward(0, [get_gradient_edge(loss)], [torch.ones_like(loss)])
    early = sum(calls.values())
    split.weight(0)
    counts = set(calls.values())
    return counts.pop() if early == 0 and len(counts) == 1 else 0


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two is None or (one is not None and two is not None and torch.equal(one, two))
