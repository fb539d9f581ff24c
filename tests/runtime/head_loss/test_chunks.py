"""The arithmetic of a loss in chunks, by form: autograd's numbers, what it must not do, and hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.head_loss.chunks import Head, Rule, Wanted, gradients, losses
from schedc_runtime.head_loss.functions import HeadRows, again, early

ROWS, WIDTH, WORDS, FACTOR = 21, 6, 40, 0.125
FORMS = pytest.mark.parametrize("form", ["early", "again"])


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and targets with ignored rows, all those of one chunk among them."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[[0, 4, 5, 6, 7, 20]] = -100
    return x, weight, bias, targets


def loss_of(form: str, x: Tensor, head: Head, targets: Tensor, rule: Rule, *, at_once: bool = True) -> Tensor:
    rows = HeadRows(x, targets)
    return early(rows, head, rule, FACTOR, at_once=at_once) if form == "early" else again(rows, head, rule)


def differentiate(loss: Tensor) -> None:
    loss.backward(torch.full_like(loss, FACTOR))


@FORMS
@pytest.mark.parametrize("chunk", [1, 4, 7, 8, 21, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_a_loss_in_chunks_is_that_of_autograd(form: str, chunk: int, biased: bool, capped: bool) -> None:
    x, weight, bias, targets = tensors()
    after = (lambda logits: torch.tanh(logits / 3) * 3) if capped else None
    logits = functional.linear(x, weight, bias if biased else None)
    logits = logits if after is None else after(logits)
    whole = functional.cross_entropy(logits, targets, reduction="sum")
    inputs = (x, weight, bias) if biased else (x, weight)
    wanted = torch.autograd.grad(whole, inputs, torch.full_like(whole, FACTOR))
    weight.grad = torch.ones_like(weight)  # what an earlier microbatch has left
    loss = loss_of(form, x, Head(weight, bias if biased else None), targets, Rule(chunk, after=after))
    differentiate(loss)
    torch.testing.assert_close(loss, whole, rtol=1e-13, atol=0)
    assert weight.grad is not None
    weight.grad -= 1
    for tensor, grad in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=1e-15)


def test_early_adds_at_once_or_in_the_backward() -> None:
    grads = []
    for at_once in (True, False):
        x, weight, _, targets = tensors()
        loss = loss_of("early", x, Head(weight), targets, Rule(4), at_once=at_once)
        assert (weight.grad is not None) == at_once
        differentiate(loss)
        grads.append(weight.grad)
    assert torch.equal(*grads)


def test_hooks_of_the_weight_see_its_gradient() -> None:
    x, weight, _, targets = tensors()
    seen: list[Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad.clone()))  # type: ignore[no-untyped-call]
    for _ in range(2):
        loss_of("early", x, Head(weight), targets, Rule(4))
    assert len(seen) == 2
    torch.testing.assert_close(weight.grad, seen[0] + seen[1])


@FORMS
def test_sums_over_many_chunks_are_wide(form: str) -> None:
    exact, errors = None, []
    for dtype, chunk in ((torch.float64, ROWS), (torch.bfloat16, ROWS), (torch.bfloat16, 1)):
        x, weight, _, targets = tensors(torch.bfloat16)
        x, weight = x.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
        loss = loss_of(form, x, Head(weight), targets, Rule(chunk))
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        differentiate(loss)
        assert weight.grad is not None
        exact = weight.grad if exact is None else exact
        errors.append(float((weight.grad.double() - exact).norm() / exact.norm()))
    assert 0 < errors[2] <= 1.05 * errors[1] < 0.01


@FORMS
def test_nothing_asks_the_device_for_a_value(form: str) -> None:
    x, weight, _, targets = (tensor.detach().to("meta") for tensor in tensors())  # where asking is an error
    x.requires_grad_()
    weight.requires_grad_()
    differentiate(loss_of(form, x, Head(weight), targets, Rule(4)))
    assert x.grad is not None
    assert x.grad.is_meta


def test_only_what_is_wanted_is_computed() -> None:
    x, weight, bias, targets = (tensor.detach() for tensor in tensors())
    total, log_sums = losses(x, Head(weight, bias), targets, Rule(8))
    again_total, x_grad, sums = gradients(
        x, Head(weight, bias), targets, Rule(8), 1.0, wanted=Wanted(False, True, False)
    )
    assert torch.equal(total, again_total)
    assert (x_grad, sums.bias) == (None, None)
    twice = gradients(x, Head(weight, bias), targets, Rule(8), 1.0, wanted=Wanted(False, True), log_sums=log_sums)[2]
    assert torch.equal(sums.weight, twice.weight)  # type: ignore[arg-type]
