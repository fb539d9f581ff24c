"""What a forward does in Python alone: units do it in each step; between them it is refused, or a warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition import partition

WIDTH = 4
ROWS = torch.ones(2, WIDTH)


class Chain(nn.Module):
    """Four blocks. ``between`` is what the forward does behind each of them."""

    def __init__(self, between: Callable[[Chain, Tensor], Tensor], block: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(WIDTH, WIDTH) for _ in range(4)])
        self.between = between
        self.total: Tensor | float = 0.0
        self.calls = 0
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(self, block(x))
        return x + self.table()


class Table(nn.Module):
    """Keeps a table for the next call, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self) -> Tensor:
        self.kept = torch.arange(float(WIDTH))
        return self.kept


class Drawing(nn.Linear):
    """Draws from Python and numpy, and counts its calls, inside of the unit."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (random.random() + np.random.rand())


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_between_units_are_refused_and_put_back(draw: Callable[[], float]) -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()
    with pytest.raises(PartitionError, match=r"(?s)Chain draws from Python's or numpy's.*layer drop"):
        partition(Chain(lambda _, x: x if draw() < 0.5 else x * 2), 2, example=ROWS)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())


def test_draws_and_attributes_of_units_are_theirs() -> None:
    before = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(Chain(lambda _, x: x, Drawing), 2, example=ROWS)
    assert random.getstate() == before


def test_attributes_that_are_set_between_units_are_a_warning() -> None:
    def between(model: Chain, x: Tensor) -> Tensor:
        model.total = model.total + x.mean()
        model.calls += 1
        return x

    model = Chain(between)
    with pytest.warns(UserWarning, match="Chain sets `total`, `calls` between its units"):
        partition(model, 2, example=ROWS)
    assert (model.total, model.table.kept) == (0.0, None)
