"""Hooks under a split backward: nodes with hooks, and the effect of each hook on the operands of W."""

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


def listen(model: nn.Module, calls: list[str]) -> list[Any]:
    """Hooks of every kind on the parameters of three layers; one changes its gradient. The nodes are to be held."""
    first, second, third = (layer.weight for layer in model.children())
    first.register_hook(lambda grad: calls.append("tensor") or grad * 2)  # type: ignore[func-returns-value]
    second.register_post_accumulate_grad_hook(lambda _: calls.append("added"))
    node = get_gradient_edge(third).node
    node.register_hook(lambda *_: calls.append("behind"))
    node.register_prehook(lambda grads: calls.append("before"))
    return [node]


def test_hooks_of_parameters_fire_from_when_they_come() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    expected, inputs = copy.deepcopy(model), list(torch.randn(4, 3, WIDTH))
    splitting, calls, wanted_calls = Splitting(model), [], []
    for key, x in enumerate(inputs):
        if key == 2:
            held = listen(model, calls), listen(expected, wanted_calls)
            assert len(held) == 2
        plain(expected, [x])
        splitting.i(key, x)
        assert len(calls) == 4 * max(0, key - 2)
        splitting.split.weight(key)
        assert (
            sorted(calls) == sorted(wanted_calls) == sorted(["added", "before", "behind", "tensor"] * max(0, key - 1))
        )
        assert differing(model, expected) == []


@pytest.mark.parametrize("late", ["bias", "weight"])
def test_gradients_of_another_type_are_added_as_autograd_does(late: str) -> None:
    """``grad_dtype`` lets a parameter of low precision have a gradient of high precision."""
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).bfloat16(),
        torch.randn(3, 3, WIDTH).bfloat16(),
    )
    expected = copy.deepcopy(model)
    for net in (model, expected):
        for layer in net:
            getattr(layer, late).grad_dtype = torch.float32
    plain(expected, list(inputs))
    splitting = Splitting(model)
    for key, x in enumerate(inputs):
        splitting.i(key, x)
        splitting.split.weight(key)
    assert differing(model, expected) == []
    assert getattr(model[0], late).grad.dtype == torch.float32
