"""The loss where ranks share the columns of the logits: numbers of the whole loss, and what travels and is alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.head_loss.chunks import Head, Rule, losses
from schedc_runtime.head_loss.columns import LogitColumns
from schedc_runtime.head_loss.functions import HeadRows, again, early
from support.thread_ranks import Meeting, ThreadCommunicator, on_threads
from support.vocabulary_cases import Logits

ROWS, WIDTH, WORDS, FACTOR, CHUNK = 21, 6, 40, 0.125, 8
FORMS = pytest.mark.parametrize("form", ["early", "again"])


class Watched(ThreadCommunicator):
    """Counts the numbers that this rank sends, by label."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.numbers: dict[str, list[int]] = {}

    def all_gather(self, tensor: Tensor, label: str = "") -> Any:
        self.numbers.setdefault(label, []).append(tensor.numel())
        return super().all_gather(tensor, label)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and targets with ignored rows. Logits of one rank are far above the others."""
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    bias[:10] += 30.0
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[[0, 4, 5, 6, 7, 20]] = -100
    targets[1], targets[2] = 0, WORDS - 1
    return x.to(dtype), weight.to(dtype), bias.to(dtype), targets


def by_columns(
    form: str, ranks: int, *, after: Callable[[Tensor], Tensor] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[Watched], list[Logits]]:
    """(loss of rank 0, gradients of x, weight and bias put together, communicators, logits that were made)."""
    meeting = Meeting(ranks)
    ends = [Watched(meeting, rank) for rank in range(ranks)]
    watches = [Logits([WORDS // ranks, WORDS]) for _ in range(ranks)]
    x, weight, bias, targets = tensors(dtype)

    def run(rank: int) -> list[Tensor]:
        own = slice(rank * WORDS // ranks, (rank + 1) * WORDS // ranks)
        mine = [part.clone().requires_grad_() for part in (x, weight[own], bias[own])]
        rule = Rule(CHUNK, after=after, columns=LogitColumns(ends[rank]))
        rows, head = HeadRows(mine[0], targets), Head(mine[1], mine[2])
        with watches[rank]:
            loss = again(rows, head, rule) if form == "again" else early(rows, head, rule, FACTOR, at_once=False)
            started = ends[rank].issued
            loss.backward(torch.full_like(loss, FACTOR))
        assert ends[rank].issued == started, "a backward starts no collective"
        return [loss.detach(), *(part.grad for part in mine if part.grad is not None)]

    found = on_threads(run, ranks)
    assert all(torch.equal(each[0], found[0][0]) for each in found)
    grads = [torch.stack([each[1] for each in found]).sum(0), *(torch.cat([each[n] for each in found]) for n in (2, 3))]
    return found[0][0], grads, ends, watches


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("capped", [False, True])
def test_shares_of_columns_have_the_loss_of_the_whole(form: str, ranks: int, capped: bool) -> None:
    after = (lambda logits: torch.tanh(logits / 3) * 3) if capped else None
    parts = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors()]
    logits = functional.linear(*parts[:3])
    whole = functional.cross_entropy(logits if after is None else after(logits), parts[3], reduction="sum")
    wanted = torch.autograd.grad(whole, parts[:3], torch.full_like(whole, FACTOR))
    loss, grads, _, _ = by_columns(form, ranks, after=after)
    assert abs(loss - whole) <= 1e-14 * whole.abs()
    for grad, expected in zip(grads, wanted, strict=True):
        assert (grad - expected).abs().max() <= 1e-14 * expected.abs().max()


@pytest.mark.parametrize(("form", "calls"), [("early", [16, 16, 10]), ("again", [42])])
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_numbers_of_a_row_travel_and_a_chunk_of_own_columns_is_alive(
    form: str, calls: list[int], ranks: int
) -> None:
    _, _, ends, watches = by_columns(form, ranks)
    assert [end.numbers for end in ends] == [{"vocabulary": calls}] * ranks
    assert {(watch.rows, watch.columns) for watch in watches} == {(CHUNK, WORDS // ranks)}


@FORMS
def test_losses_and_sums_of_narrow_columns_are_wide(form: str) -> None:
    exact, (loss, grads, _, _) = by_columns(form, 2)[:2], by_columns(form, 2, dtype=torch.bfloat16)
    assert loss.dtype is torch.float32
    assert abs(loss.double() - exact[0]) <= 0.02 * exact[0]
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3


@pytest.mark.parametrize("target", [-1, WORDS])
def test_a_target_that_no_rank_has_fails_on_every_rank(target: int) -> None:
    meeting, (x, weight, _, targets) = Meeting(2), tensors()
    targets[3] = target

    def run(rank: int) -> str:
        rule = Rule(CHUNK, columns=LogitColumns(ThreadCommunicator(meeting, rank)))
        try:
            losses(x, Head(weight.chunk(2)[rank]), targets, rule)
        except (RuntimeError, IndexError) as error:
            return str(error)
        return ""

    assert all("out of bounds" in told for told in on_threads(run, 2))


def test_logits_are_whole_where_they_are_asked_for() -> None:
    meeting, logits = Meeting(4), torch.arange(48.0).view(2, 3, 8)
    parts = on_threads(lambda r: LogitColumns(ThreadCommunicator(meeting, r)).whole(logits.chunk(4, -1)[r]), 4)
    assert all(torch.equal(part, logits) for part in parts)
