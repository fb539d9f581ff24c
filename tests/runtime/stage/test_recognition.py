"""Recognition of a graph's form: straight code says the same as the loop, and neither takes another graph for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from schedc_runtime.stage.graph import recognized, walk
from schedc_runtime.stage.recognition import OFTEN, Recognition, straight_code
from support.split_models import MODELS, WIDTH, Splitting


def root(tensor: Tensor) -> list[Any]:
    return [get_gradient_edge(tensor).node]


@pytest.mark.parametrize("name", MODELS)
def test_straight_code_finds_the_same_nodes(name: str) -> None:
    make, sample, _ = MODELS[name]
    torch.manual_seed(0)
    splitting, x = Splitting(make()), sample()
    form, _ = walk(root(splitting.forward(x)[1]))
    code = straight_code(form)
    for _ in range(2):
        roots = root(splitting.forward(x)[1])
        assert code(roots) == recognized(form, roots) == walk(roots)[1]


WEIGHTS = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)]


def leaf() -> Tensor:
    return torch.ones(3, WIDTH, requires_grad=True)


def once(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first.mm(WEIGHTS[0]), second.mm(WEIGHTS[1])]).sin()


def shared(x: Tensor) -> Tensor:
    doubled = x * 2
    return once(doubled, doubled)


PAIR = torch.ones(2, 3, WIDTH)
FORMS: dict[str, Callable[[], Tensor]] = {
    "two inputs": lambda: once(leaf() * 2, leaf() * 2),
    "one node twice": lambda: shared(leaf()),
    "one leaf twice": lambda: (lambda x: once(x * 2, x * 2))(leaf()),
    "no gradient on one side": lambda: once(leaf() * 2, torch.ones(3, WIDTH)),
    "another kind": lambda: once(leaf() * 2, leaf() + 2),
    "longer": lambda: once(leaf() * 2 * 2, leaf() * 2),
    "weights in another order": lambda: torch.cat([(leaf() * 2).mm(WEIGHTS[1]), (leaf() * 2).mm(WEIGHTS[0])]).sin(),
    "one weight twice": lambda: torch.cat([(leaf() * 2).mm(WEIGHTS[0]), (leaf() * 2).mm(WEIGHTS[0])]).sin(),
    "another weight": lambda: torch.cat(
        [(leaf() * 2).mm(WEIGHTS[0]), (leaf() * 2).mm(nn.Parameter(PAIR[0].t() @ PAIR[0]))]
    ).sin(),
    "a parameter for an input": lambda: once(leaf() * 2, nn.Parameter(PAIR[0].clone()) * 2),
    "three in a row": lambda: torch.cat([(leaf() * 2).mm(w) for w in (*WEIGHTS, WEIGHTS[0])]).sin(),
}


NEW_WEIGHT = ("another weight", "a parameter for an input")
"""Forms whose graphs never come again, because their parameter is a new one."""


@pytest.mark.parametrize("name", FORMS)
def test_no_other_graph_is_taken_for_it(name: str) -> None:
    form, _ = walk(root(FORMS[name]()))
    code = straight_code(form)
    for other, make in FORMS.items():
        roots = root(make())
        assert (recognized(form, roots) is None) == (code(roots) is None) == (other != name or name in NEW_WEIGHT)


def test_outputs_of_a_node_are_told_apart() -> None:
    def graph(first: int) -> list[Any]:
        parts = PAIR.clone().requires_grad_().unbind()
        return root(once(parts[first] * 2, parts[1 - first] * 2))

    form, _ = walk(graph(0))
    for find in (straight_code(form), lambda roots: recognized(form, roots)):
        assert find(graph(0)) is not None
        assert find(graph(1)) is None


def test_a_form_that_comes_often_gets_its_own_code() -> None:
    make = FORMS["two inputs"]
    recognition = Recognition(walk(root(make()))[0])
    for _ in range(OFTEN + 2):
        assert recognition.nodes(root(FORMS["longer"]())) is None
        assert recognition.nodes(root(make())) is not None
    assert recognition._code is not None
