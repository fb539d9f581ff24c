"""Rows of a microbatch that see each other: refused in slices and in padded batches, by what a model does.

The cases are functions that a block applies to its hidden state [rows, length, width], inside of a unit or between two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.load.library import InSlices
from schedc.plan import Plan
from schedc_runtime import Loss, Pipeline
from schedc_runtime.kernels.heads import heads_of_latents
from schedc_runtime.kernels.norm import normalised
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.row_flow.follow import follow
from support.sweeps import halved, swept

pytestmark = pytest.mark.slow

Function = Callable[[Tensor], Tensor]
WIDTH = 6


class Block(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x))


class Model(nn.Module):
    """Two blocks; the function is part of the first, or of the code behind it."""

    def __init__(self, function: Function, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(function if inside else torch.tanh), Block(torch.tanh)])
        self.function, self.inside = function, inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x if self.inside else self.function(x))


class Reversed(torch.autograd.Function):
    """Has a gradient in which rows meet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Negated(Reversed):
    """Has a gradient that keeps rows apart."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def centred_gradient(x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient - gradient.mean(0))
    return x


def first_row_set(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 0
    return x


def wrong_flat_index(x: Tensor) -> Tensor:
    rows, length, width = x.shape
    return x.reshape(rows * length, width)[torch.arange(rows) + x[:, :, 0].argmax(1)][:, None]


def heads_of_other_rows(x: Tensor) -> Tensor:
    heads = x.reshape(len(x), -1, 3).transpose(0, 1)
    return ((heads @ heads.transpose(1, 2)).softmax(-1) @ heads).transpose(0, 1).reshape(x.shape)


def attended(x: Tensor) -> Tensor:
    rows_as_length = x.transpose(0, 1)
    return functional.scaled_dot_product_attention(rows_as_length, rows_as_length, rows_as_length).transpose(0, 1)


def latent(x: Tensor) -> Tensor:
    """Three heads, whose columns all have positions."""
    queries, keys, values = heads_of_latents(2 * x, x[..., :2], 3 * x, 3, 0)
    return (queries + keys + values).transpose(1, 2).reshape(x.shape)


MEETING: dict[str, Function] = {
    "mean": lambda x: x - x.mean(0),
    "detached maximum": lambda x: x / x.abs().max().detach(),
    "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "permuted": lambda x: x + x[torch.randperm(len(x))],
    "reversed": lambda x: x[list(range(len(x)))[::-1]],
    "length": lambda x: x / len(x),
    "root of the size": lambda x: x * x.shape[0] ** 0.5,
    "counted ones": lambda x: x / torch.ones(len(x)).sum(),
    "sum": lambda x: x + x.sum(),
    "first row": lambda x: x + x[:1],
    "norm": lambda x: x / x.norm(),
    "deviation": lambda x: x / x.std(0),
    "products of rows": lambda x: torch.einsum("bc,ctd->btd", torch.einsum("btd,ctd->bc", x, x), x),
    "rows as length": attended,
    "transposed": lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "flattened": lambda x: x.view(-1).softmax(0).view_as(x),
    "row numbers": lambda x: x + torch.arange(len(x), dtype=x.dtype)[:, None, None],
    "a triangle": lambda x: torch.einsum("bc,ctd->btd", torch.ones(len(x), len(x), dtype=x.dtype).tril(), x),
    "shifted": lambda x: torch.cat([x[1:], x[:1]]),
    "statistics": lambda x: functional.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x),
    "median": lambda x: x * (x.abs() < x.abs().flatten().median()),
    "a loop": lambda x: torch.stack([x[row] * row for row in range(len(x))]),
    "a backward": Reversed.apply,
    "a hook": centred_gradient,
    "a write": first_row_set,
    "an index": wrong_flat_index,
    "heads": heads_of_other_rows,
    "a norm of rows": lambda x: normalised(x.transpose(0, 2), None, 1e-6).transpose(0, 2),
    "rows as positions": lambda x: latent(x.transpose(0, 1)).transpose(0, 1),
}


def written_rows(x: Tensor) -> Tensor:
    shifted = torch.zeros(x.shape, dtype=x.dtype)
    shifted[:, 1:] = x[:, :-1]
    shifted[torch.arange(len(x)), 0] = x[:, -1]
    return shifted


def right_flat_index(x: Tensor) -> Tensor:
    rows, length, width = x.shape
    return x.reshape(rows * length, width)[torch.arange(rows) * length + x[:, :, 0].argmax(1)][:, None]


def routed(x: Tensor) -> Tensor:
    """Experts by a sort of all tokens, and back."""
    tokens = x.reshape(-1, x.shape[-1])
    order = tokens.argmax(-1).argsort()
    result = torch.empty_like(tokens)
    result[order] = tokens[order] * 2
    return result.view_as(x)


def by_expert(x: Tensor) -> Tensor:
    """Experts by the indices of their tokens, which follow from values."""
    tokens = x.reshape(-1, x.shape[-1])
    result = torch.zeros_like(tokens)
    for expert in range(2):
        chosen = (tokens.argmax(-1) % 2 == expert).nonzero().flatten()
        result = result.index_add(0, chosen, tokens[chosen] * (expert + 1))
    return result.view_as(x)


def heads(x: Tensor) -> Tensor:
    """As `nn.MultiheadAttention` with the length first."""
    x = x.transpose(0, 1)
    own = x.reshape(x.shape[0], -1, 3).transpose(0, 1)
    return ((own @ own.transpose(1, 2)).softmax(-1) @ own).transpose(0, 1).reshape(x.shape).transpose(0, 1)


APART: dict[str, Function] = {
    "norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "flat norm": lambda x: functional.layer_norm(x.flatten(0, 1), (WIDTH,)).unflatten(0, x.shape[:2]),
    "mean of a row": lambda x: x - x.mean((1, 2), keepdim=True),
    "length first": lambda x: x.transpose(0, 1).contiguous().softmax(0).transpose(0, 1),
    "class token": lambda x: torch.cat([torch.zeros(len(x), 1, WIDTH, dtype=x.dtype), x], 1)[:, 1:],
    "dropout": lambda x: functional.dropout(x, 0.5),
    "stochastic depth": lambda x: x * (torch.rand(len(x), 1, 1) > 0.1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "channels": lambda x: functional.conv1d(x, torch.ones(x.shape[1], x.shape[1], 3, dtype=x.dtype), padding=1),
    "instance norm": functional.instance_norm,
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "spectrum": lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
    "guided": lambda x: sum(torch.cat([x, 2 * x]).chunk(2)),  # type: ignore[arg-type, return-value]
    "repeated": lambda x: x.repeat_interleave(2, 0).view(len(x), 2, *x.shape[1:]).mean(1),
    "sorted": lambda x: x.gather(1, x.argsort(1)).cumsum(1).roll(1, 1),
    "last token": lambda x: x[torch.arange(len(x)), x[:, :, 0].argmax(1)][:, None],
    "masked": lambda x: x * (torch.arange(x.shape[1]) < x[:, :, :1].argmax(1))[:, :, None],
    "distances": lambda x: torch.cdist(x, x) @ x,
    "a backward": Negated.apply,
    "written": written_rows,
    "an index": right_flat_index,
    "heads": heads,
    "latent heads": latent,
    "length first, norm": lambda x: normalised(x.transpose(0, 1), torch.ones(WIDTH).to(x), None).transpose(0, 1),
}
INSIDE: dict[str, Function] = {
    "a sort of tokens": routed,
    "indices of tokens": by_expert,
    "a loop over rows": lambda x: torch.stack([x[row] * 2 for row in range(len(x))]),
}
"""What only values show to keep rows apart: it is tried out, in a unit."""


def meetings(function: Function, inside: bool) -> list[str]:
    torch.manual_seed(0)
    rows = torch.randn(4, 8, WIDTH, dtype=torch.float64)
    parts = partition(Model(function, inside).double(), 2, example=rows)
    return [str(meeting) for meeting, _ in follow(parts.records, (rows,), {}, training=True).meetings]


@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*MEETING], [*MEETING][::3]))
def test_rows_that_meet_are_found(name: str) -> None:
    for inside in (True, False):
        assert meetings(MEETING[name], inside), f"inside: {inside}"


@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*APART, *INSIDE], [*APART, *INSIDE][::3]))
def test_rows_that_stay_apart_are_let_through(name: str) -> None:
    assert meetings((APART | INSIDE)[name], inside=True) == []
    if name in APART:
        assert meetings(APART[name], inside=False) == []


def squares(output: Tensor, target: Tensor) -> Loss:
    return Loss((output - target).square().sum(), target.numel())


def pipeline(
    function: Function, *, slices: int = 1, inside: bool = True, plan: Plan | None = None
) -> tuple[Pipeline, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model(function, inside).double()
    whole = copy.deepcopy(model)
    rows = torch.randn(8, 4, WIDTH, dtype=torch.float64)
    program = schedc.compile(InSlices("1f1b", slices) if slices > 1 else "1f1b", P=2, M=2)
    return Pipeline(model, program, loss_fn=squares, in_process=True, example=rows, plan=plan), whole, rows


@pytest.mark.parametrize("inside", [True, False])
def test_slices_and_padded_batches_are_refused_by_the_line(inside: bool) -> None:
    where = "in `blocks.0` " if inside else ""
    says = rf"{where}`mean` goes over the rows\n  --> .*test_meeting_rows.py:\d+: \"mean\": lambda x: x - x.mean\(0\)"
    pipe, whole, rows = pipeline(MEETING["mean"], inside=inside)
    for _ in range(2):
        with pytest.raises(BatchRefused, match=rf"(?s)batch has 7 rows.* cannot be padded: {says}"):
            pipe.step(rows[:7], rows[:7])
    loss = pipe.step(rows, rows)  # a microbatch may be what its rows are together
    parts = [squares(whole(part), part) for part in rows.chunk(2)]
    torch.testing.assert_close(loss, (sum(p.sum for p in parts) / rows.numel()).detach(), rtol=1e-12, atol=0)
    pipe, _, rows = pipeline(MEETING["mean"], slices=2, inside=inside)
    with pytest.raises(
        BatchRefused, match=rf"stage in slices lets rows of a microbatch see each other: stage 0, {says}"
    ):
        pipe.step(rows, rows)
    with pytest.raises(BatchRefused, match="stage in slices"):
        pipe.evaluate(rows, rows)


@pytest.mark.sweep
@pytest.mark.parametrize("name", halved(["last token", "guided", "heads", "a sort of tokens"]))
@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_let_through_has_the_gradients_of_the_model(name: str, slices: int) -> None:
    pipe, whole, rows = pipeline((APART | INSIDE)[name], slices=slices)
    rows = rows if slices > 1 else rows[:7]
    loss, expected = pipe.step(rows, rows), squares(whole(rows), rows)
    mean = expected.sum / expected.count
    mean.backward()
    torch.testing.assert_close(loss, mean.detach(), rtol=1e-12, atol=0)
    for key, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(key).grad, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("slices", [(1, 2), (2, 1)])
def test_only_stages_in_slices_must_keep_rows_apart(slices: tuple[int, int]) -> None:
    """Rows meet in stage 0."""
    pipe, whole, rows = pipeline(MEETING["mean"], plan=Plan(overlap=True, slices=slices))
    if slices[0] > 1:
        with pytest.raises(BatchRefused, match=r"see each other: stage 0, in `blocks\.0` `mean`"):
            pipe.step(rows, rows)
        return
    parts = [squares(whole(part), part) for part in rows.chunk(2)]
    mean = sum(part.sum for part in parts) / rows.numel()
    torch.testing.assert_close(pipe.step(rows, rows), mean.detach(), rtol=1e-12, atol=0)


class Folded(Model):
    """Values between its stages, and its result, have another dimension ahead of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        x = self.blocks[0](x.transpose(0, 1).reshape(length * rows, width))
        return self.blocks[1](x).view(length, rows, width)


def test_rows_behind_another_dimension_are_seen() -> None:
    """As long as there are rows, so that no shape shows it."""
    torch.manual_seed(0)
    rows = torch.randn(8, 4, WIDTH, dtype=torch.float64)
    program = schedc.compile(InSlices("1f1b", 2), P=2, M=2)
    model = Folded(torch.tanh, True).double()
    pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=rows)
    with pytest.raises(BatchRefused, match="what crosses to stage 1 has another dimension ahead of its rows"):
        pipe.step(rows, rows)
    model, program = Folded(torch.tanh, True).double(), schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=rows)
    with pytest.raises(BatchRefused, match="cannot be padded: the model's output has its rows in dimension 1"):
        pipe.step(rows[:7], rows[:7])
