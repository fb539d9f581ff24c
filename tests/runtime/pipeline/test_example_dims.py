"""Batches in which the rows of a tensor are not its first dimension: `Pipeline(example_dims=...)`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.load.library import InSlices
from schedc_runtime import Loss, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.agree.batch import BatchRefused
from support.sweeps import halved

WIDTH, LENGTH, GRIDS = 4, 6, 3
DIMS: Mapping[str, int | None] = {"positions": 1, "table": None}


class Positioned(nn.Module):
    """Adds [grids, rows, tokens] positions to the embedding, and a table that all rows share behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, table: Tensor | None = None, extra: Any = None) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h + positions.sum(0).unsqueeze(-1))
        h = h if table is None else h * table
        return h if extra is None else h + extra["shift"][0].T.unsqueeze(-1)


def fields(rows: int) -> dict[str, Tensor]:
    tokens = torch.arange(rows * LENGTH).remainder(9).reshape(rows, LENGTH)
    positions = torch.randn(GRIDS, rows, LENGTH, generator=torch.Generator().manual_seed(1))
    return {"x": tokens, "positions": positions, "table": torch.arange(LENGTH * WIDTH).reshape(LENGTH, WIDTH) / 9}


def loss_fn(output: Tensor, targets: Tensor) -> Loss:
    return Loss((output[..., 0] - targets).square().sum(), targets.numel())


def pipeline(
    dims: Mapping[str, int | None] | None = DIMS, slices: int = 1, **options: Any
) -> tuple[Pipeline, Positioned]:
    model = Positioned()
    program = schedc.compile(InSlices("1f1b", slices) if slices > 1 else "1f1b", P=2, M=2)
    settings = {"loss_fn": loss_fn, "count_fn": Tensor.numel, "in_process": True, "example": fields(4)} | options
    return Pipeline(model, program, example_dims=dims, **settings), copy.deepcopy(model)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "slices"), halved([(4, 1), (3, 1), (5, 1), (4, 2)]))
def test_steps_are_those_of_the_whole_model(rows: int, slices: int) -> None:
    """Three rows are as many as grids; five are padded."""
    pipe, whole = pipeline(slices=slices)
    batch, targets = fields(rows), torch.linspace(-1, 1, rows * LENGTH).reshape(rows, LENGTH)
    result = pipe.step(batch, targets, outputs=True)
    output = whole(**batch)
    loss = loss_fn(output, targets)
    (loss.sum / loss.count).backward()
    torch.testing.assert_close(result.loss, (loss.sum / loss.count).detach())
    torch.testing.assert_close(result.outputs, output)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pipe.evaluate(tuple(batch.values()), targets), result.loss)


class Turned(nn.Module):
    """Takes [tokens, rows] first, and [rows, tokens] behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, turned: Tensor, x: Tensor) -> Tensor:
        return self.block(self.embed(turned).transpose(0, 1) + self.embed(x).cumsum(1))


@pytest.mark.parametrize("rows", [4, LENGTH])
def test_a_dimension_of_the_first_argument_is_not_that_of_others(rows: int) -> None:
    """Where rows are as many as tokens, a cut along the other dimension has the same shapes."""
    torch.manual_seed(2)
    x, model = fields(rows)["x"], Turned()
    targets, program = torch.zeros(rows, LENGTH), schedc.compile("1f1b", P=2, M=2)
    loss = loss_fn(model(x.T + 0, x), targets)
    for batch in ((x.T + 0, x), {"turned": x.T + 0, "x": x}):
        options = {"loss_fn": loss_fn, "count_fn": Tensor.numel, "in_process": True, "example": batch}
        pipe = Pipeline(copy.deepcopy(model), program, example_dims={"turned": 1}, **options)
        torch.testing.assert_close(pipe.step(batch, targets), (loss.sum / loss.count).detach())


def test_a_dimension_holds_inside_of_an_argument() -> None:
    pipe, whole = pipeline({**DIMS, "extra": -1})
    batch: dict[str, Any] = {**fields(4), "extra": {"shift": [torch.arange(4.0 * LENGTH).reshape(LENGTH, 4)]}}
    loss = loss_fn(whole(**batch), torch.zeros(4, LENGTH))
    torch.testing.assert_close(pipe.step(batch, torch.zeros(4, LENGTH)), (loss.sum / loss.count).detach())


def test_what_does_not_fit_is_refused_by_name() -> None:
    for dims, what in (
        ({"places": 1}, r"example_dims names `places`; Positioned takes \['x', 'positions', 'table', 'extra'\]"),
        ({"positions": "rows"}, r"example_dims\['positions'\] is 'rows'"),
        (None, r"positions'\] \(float32\[3, 4, 6\]\) differ in their first.*example_dims=\{'position_ids': 1\}"),
        ({"positions": 1}, r"x'\] .*and example\['table'\] .* differ in their first dimension.*None for a tensor"),
        ({"table": None}, r"example\['positions'\] .* differ in their first dimension"),
        ({"positions": 3}, r"positions'\] \(float32\[3, 4, 6\]\) has no dimension 3, which example_dims names"),
        ({"positions": -4}, "has no dimension -4"),
    ):
        with pytest.raises(RuntimeFault, match=f"(?s){what}"):
            pipeline(dims)  # type: ignore[arg-type]
    with pytest.raises(BatchRefused, match=r"example\[0\] is a object"):
        pipeline(example=(object(),))
    pipe, _ = pipeline()
    batch = fields(4) | {"positions": fields(2)["positions"]}
    with pytest.raises(
        BatchRefused, match=r"positions'\] \(float32\[3, 2, 6\] in dimension 1\) differ in their number"
    ):
        pipe.step(batch, torch.zeros(4, LENGTH))
