"""A small GPT in stages, its batches, and its gradients by autograd, for the tests of stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.partition import Partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.stage.stage import Stage

VOCAB, WIDTH, TOKENS = 13, 8, 4


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, width=WIDTH, heads=2, blocks=4, context=TOKENS, **options)).double()


def batches(count: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, count, 2, TOKENS), generator=generator)
    return list(tokens[0]), list(tokens[1])


def make_stages(parts: Partition, loss_fn: Any, *args: Any) -> list[Stage]:
    boundaries = infer_boundaries(parts, args)
    stages = [Stage(module, k, parts.stages, loss_fn=loss_fn) for k, module in enumerate(parts.modules)]
    for stage, (before, after) in zip(stages, pairwise(boundaries), strict=True):
        stage.bind(before, after)
    return stages


def forward(stages: Sequence[Stage], m: int, inputs: Sequence[Any], target: Any, scale: float) -> tuple[Tensor, ...]:
    values = tuple(x for x in inputs if isinstance(x, Tensor))
    for stage in stages:
        values = stage.forward(m, values, target, scale)
    return values


def backward(stages: Sequence[Stage], m: int, *, defer: bool) -> None:
    grads: tuple[Tensor, ...] = ()
    for stage in reversed(stages):
        grads = stage.backward(m, grads, defer=defer)
    assert grads == ()


def full(stages: Sequence[Stage], m: int) -> None:
    backward(stages, m, defer=False)


def split(stages: Sequence[Stage], m: int) -> None:
    backward(stages, m, defer=True)
    for stage in stages:
        stage.weight(m)


def written(stages: Sequence[Stage], inputs: Sequence[Sequence[Any]], targets: Sequence[Any], scale: float) -> None:
    """A run of all microbatches, F of all and then B of all, as a stream that is written out calls its stages."""
    calls = [stage.calls_of_run() for stage in stages]
    for m, entering in enumerate(inputs):
        values = tuple(x for x in entering if isinstance(x, Tensor))
        for call in calls:
            values = call.F(m, values, targets[m], scale)
    for m in range(len(inputs)):
        grads: tuple[Tensor, ...] = ()
        for call in reversed(calls):
            grads = call.B(m, grads)
        assert grads == ()


def take_grads(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, grad in a.items():
        torch.testing.assert_close(grad, b[name], rtol=1e-11, atol=1e-13, msg=name)


def autograd(
    model: nn.Module, inputs: Sequence[Sequence[Any]], targets: Sequence[Any], loss_fn: Any
) -> dict[str, Tensor]:
    """Gradients of the whole model, without stages."""
    for args, target in zip(inputs, targets, strict=True):
        (loss_fn(model(*args), target) / len(inputs)).backward()
    return take_grads(model)
