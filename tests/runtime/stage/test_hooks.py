"""Hooks under a split backward: which nodes can have some, and that each keeps its effect on what W multiplies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from schedc_runtime.stage.hooks import NEVER, before_node, hook_mark, unhooked_from
from schedc_runtime.stage.split import SplitBackward
from support.split_models import WIDTH, Splitting, Tokens, differing, plain

HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda t: t.register_hook(lambda grad: None),
    "node, before": lambda t: get_gradient_edge(t).node.register_prehook(lambda grads: None),
    "node, behind": lambda t: get_gradient_edge(t).node.register_hook(lambda *_: None),
    "several tensors": lambda t: torch.autograd.graph.register_multi_grad_hook([t], lambda grads: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_each_kind_of_hook_is_counted(kind: str) -> None:
    mark = hook_mark()
    product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
    assert mark.node == unhooked_from(mark) <= get_gradient_edge(product).node._sequence_nr()  # type: ignore[attr-defined]
    HOOKS[kind](product)
    assert unhooked_from(mark) == NEVER
    assert unhooked_from(hook_mark()) != NEVER


def test_hooks_of_the_split_itself_do_not_count() -> None:
    mark = hook_mark()
    before_node(get_gradient_edge(torch.ones(2, requires_grad=True) * 2).node, lambda grads: None)
    assert unhooked_from(mark) == mark.node
    assert unhooked_from(None) == NEVER


class Turned(nn.Module):
    """Products of a transposed weight that the caller may have made before the forward, with hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.factor: Tensor | None = None

    def hold(self) -> None:
        self.factor = self.weight.t()
        self.factor.register_hook(lambda grad: grad * 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.factor is not None
        return self.out(torch.tanh(x.mm(self.factor)))  # type: ignore[no-any-return]


def test_a_hook_from_before_the_forward_keeps_its_effect() -> None:
    torch.manual_seed(0)
    model, inputs = Turned(), list(torch.randn(3, 4, WIDTH))
    expected = copy.deepcopy(model)
    for net in (model, expected):
        net.hold()
    plain(expected, inputs)
    splitting = Splitting(model)
    for key, x in enumerate(inputs):  # from the second on, gradients are there
        splitting.i(key, x)
        splitting.split.weight(key)
    assert differing(model, expected) == []


def hook_the_product(model: Tokens, loss: Tensor) -> None:
    """Change what arrives at the first product behind the loss, by a hook of its node."""
    nodes = [get_gradient_edge(loss).node]
    while (node := nodes.pop(0)).name() not in ("AddmmBackward0", "MmBackward0"):
        nodes += [child for child, _ in node.next_functions if child is not None]
    node.register_prehook(lambda grads: tuple(None if grad is None else grad * 2 for grad in grads))


def test_a_hook_between_f_and_i_keeps_its_effect_in_every_microbatch() -> None:
    torch.manual_seed(0)
    model, inputs = Tokens(), [torch.randint(0, 9, (4, 5)) for _ in range(3)]
    expected = copy.deepcopy(model)
    splits = Splitting(model), Splitting(expected)
    for key, ids in enumerate(inputs):
        began, (_, loss), (_, wanted) = hook_mark(), splits[0].forward(ids), splits[1].forward(ids)
        if key == 1:
            hook_the_product(model, loss)
            hook_the_product(expected, wanted)
        assert (unhooked_from(began) == NEVER) == (key == 1)
        wanted.backward()  # type: ignore[no-untyped-call]
        splits[0].split.backward(key, [get_gradient_edge(loss)], [torch.ones_like(loss)], began=began)
        splits[0].split.weight(key)
    assert differing(model, expected) == []


def test_i_leaves_no_hook_where_none_can_be() -> None:
    """The gradients then come from the engine, and no Python code runs in it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH, requires_grad=True)
    arrived = []
    for mark in (hook_mark(), None):
        loss = model(x).sum()
        split = SplitBackward()
        split.backward(0, [get_gradient_edge(loss)], [torch.ones_like(loss)], began=mark)
        works = [work for group in split.pending[0].products for work in group]
        arrived.append(sum(work.unhooked for work in works))
        assert all(work.grad is not None for work in works)
    assert arrived == [2, 0]
