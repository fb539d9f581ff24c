"""Gradients of copied experts: what I leaves for W, the type of products, and how owners add them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedc_runtime.moe.copied import CopiedExperts, CopyExchange, add_returned
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.products import Products


class Way:
    """A route with the copies of two experts, 1 and 0, that one rank holds of itself."""

    def __init__(self) -> None:
        self.copies = CopiedExperts(0, True, lambda: [[[0, 1]]])


def experts(dtype: torch.dtype) -> Experts:
    torch.manual_seed(0)
    made = Experts(2, 16, 8).to(dtype)
    made.products = Products("loop")
    return made


def grads(made: Experts) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_copies_leave_their_products_to_w(dtype: torch.dtype) -> None:
    """Rows on copies give the gradients of the same rows at home, rounded once; input gradients come in I."""
    counts = [3, 2, 5, 4]
    rows, gates = torch.randn(14, 16).to(dtype), torch.rand(14).to(dtype)
    made, way = experts(dtype), Way()
    exchange = CopyExchange(made)
    slots = exchange.finish(exchange.start(way))
    mine, leaf = rows.clone().requires_grad_(), gates.clone().requires_grad_()
    made(mine, counts, leaf, way, *slots).double().square().sum().backward()
    own = grads(made)
    wide = [way.copies.products[stack]() for stack in (0, 1)]
    assert {each.dtype for each in wide} == {torch.promote_types(dtype, torch.float32)}
    pending = exchange.start_return(way)
    assert way.copies.products == {}
    exchange.finish_return(way, pending)
    for before, piece, after in zip(own, wide, grads(made), strict=True):
        assert torch.equal(after, (before.to(piece.dtype) + piece).to(dtype))
    assert mine.grad is not None
    assert leaf.grad is not None
    alone = experts(torch.float64)
    alone.load_state_dict({name: value.double() for name, value in made.state_dict().items()})
    there = rows.double().split(counts)
    weights = gates.double().split(counts)
    order = [0, 2, 1, 3]
    whole = torch.cat([there[place] for place in order]).requires_grad_()
    alone(whole, [8, 6], torch.cat([weights[place] for place in order])).square().sum().backward()
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 0.3}
    for mixed, pure in zip(grads(made), grads(alone), strict=True):
        torch.testing.assert_close(mixed.double(), pure, **near)


def test_a_layer_outside_of_a_stage_returns_in_the_backward() -> None:
    made, way = experts(torch.float64), Way()
    exchange = CopyExchange(made)
    made(torch.randn(4, 16).double(), [0, 0, 2, 2], None, way, *exchange(way)).sum().backward()
    assert len(grads(made)) == 2
    assert all(bool(grad.flatten(1).any(1).all()) for grad in grads(made))


def test_frozen_stacks_get_nothing() -> None:
    made, way = experts(torch.float32), Way()
    made.gate_up.requires_grad_(False)
    exchange = CopyExchange(made)
    rows = torch.randn(4, 16).requires_grad_()
    made(rows, [0, 0, 2, 2], None, way, *exchange.finish(exchange.start(way))).sum().backward()
    assert list(way.copies.products) == [1]
    exchange.finish_return(way, exchange.start_return(way))
    assert made.gate_up.grad is None
    assert made.down.grad is not None
    assert bool(made.down.grad.flatten(1).any(1).all())


def test_owners_add_in_order_and_round_once() -> None:
    """In bfloat16 1 + 2^-9 is 1, and 1 + 2^-9 + 2^-9 is not. In float32 large and small do not commute."""
    stack = nn.Parameter(torch.ones(3, 1, dtype=torch.bfloat16))
    stack.grad = torch.ones(3, 1, dtype=torch.bfloat16)
    small = torch.full((5, 1), 2.0**-8)
    add_returned([stack], [2, 0, 2, 0, 2], [small])
    assert stack.grad.flatten().tolist() == [1 + 2**-7, 1, 1 + 2**-6]
    wide = nn.Parameter(torch.ones(2, 1))
    add_returned([wide], [1, 1, 1], [torch.tensor([[2.0**30], [1.0], [-(2.0**30)]])])
    assert wide.grad is not None
    assert wide.grad.flatten().tolist() == [0, 0]
    add_returned([wide], [1, 1, 1], [torch.tensor([[2.0**30], [-(2.0**30)], [1.0]])])
    assert wide.grad.flatten().tolist() == [0, 1]
