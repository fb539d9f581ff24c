"""The plan that makes rows of experts even: its promises on extreme tables, and the example of `moe.forest`."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import balance

from schedc_runtime.moe.forest import computed_rows, limits, plan_forest

torch.set_num_threads(1)


def test_promises_of_a_forest() -> None:
    """`benchmarks/balance.py forest` judges 100,000 plans."""
    counted = dict.fromkeys(balance.PROMISES, 0)
    for rows, within in balance.batches(1800, seed=1):
        for promise, which in balance.broken(rows, within).items():
            counted[promise] += int(which.sum())
    assert counted == dict.fromkeys(balance.PROMISES, 0)


def test_the_example() -> None:
    plan = plan_forest(torch.tensor([[150, 120, 115], [220, 0, 0], [100, 39, 0], [40, 240, 0]]), Fraction(1))
    assert plan.parent.tolist() == [3, 0, 0, 3]
    assert plan.taken.tolist() == [24, 36, 117, 0]
    # Rank 2 takes the first 117 rows on the line of home 0, rank 1 the next 36. The line of home 3 begins with 240.
    assert plan.quota.tolist() == [[0, 24, 0], [33, 3, 0], [117, 0, 0], [0, 0, 0]]


def test_a_child_on_the_border_of_two_experts() -> None:
    rows = torch.tensor([[3, 5], [0, 0]])
    plan = plan_forest(rows, Fraction(1))
    assert plan.quota.tolist() == [[0, 0], [0, 4]]
    rows = torch.tensor([[6, 5, 7], [0, 0, 0]])
    assert plan_forest(rows, Fraction(1)).quota.tolist() == [[0, 0, 0], [2, 0, 7]]
    assert computed_rows(rows, plan_forest(rows, Fraction(1)))[:, 0].tolist() == [[4, 5, 0], [2, 0, 7]]


@pytest.mark.parametrize(
    ("within", "most"), [("1", [26, 25, 25, 25]), ("1.01", [26] * 4), ("1.2", [31] * 4), ("4", [101] * 4)]
)
def test_limits_are_whole(within: str, most: list[int]) -> None:
    assert limits(torch.tensor([99, 1, 1, 0]), Fraction(within)).tolist() == most


def test_even_ranks_lend_nothing() -> None:
    plan = plan_forest(torch.tensor([[3, 2], [1, 4], [5, 0]]), Fraction(1))
    assert plan.taken.tolist() == [0, 0, 0]
    assert plan.parent.tolist() == [0, 1, 2]
