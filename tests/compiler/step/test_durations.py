"""The time of a cell as sums of cost keys, and what reads the sums."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from schedc.ir.ops import OpKind
from schedc.step import durations
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.durations import Sum, duration, sums, totals


def text(longest: tuple[Sum, ...]) -> str:
    """Sums as the file writes them."""
    signed = ["".join(f" {'+' if sign > 0 else '-'} {key}" for key, _, sign in terms)[3:] for terms in longest]
    return f"{{{', '.join(signed)}}}"


def test_the_file_says_the_sums() -> None:
    rows = re.findall(r"^    (F.*?)  +(\{.*?\})(?: +(\{.*?\}))?", durations.__doc__ or "", re.MULTILINE)
    assert [cell for cell, _, _ in rows] == ["F", "F & W", "F & B", "F & I"]
    for cell, joint, apart in rows:
        kinds = [OpKind[letter] for letter in cell.split(" & ")]
        assert text(sums(*kinds, joint=True)) == joint
        assert text(sums(*kinds)) == (apart or joint)
    for kind in OpKind:
        assert text(sums(kind, joint=True)) == f"{{{kind.name}}}"


def test_sums_have_values_of_any_type() -> None:
    """Each key counts at the stage of its own op: the W of a pair at that of its backward."""
    values = {"FB": (4, 5), "F": (3, 1), "I": (9, 2), "W": (7, 1)}
    split = sums(OpKind.F, OpKind.I, joint=True)
    assert totals(split, lambda key, op: Fraction(values[key][op], 3)) == [Fraction(4 - 1, 3), 1, Fraction(2, 3)]


def pair(costs: StageCosts, kinds: str, *stages: int) -> float:
    return float(duration(costs, OpKind[kinds[0]], OpKind[kinds[1]], stages))


@pytest.mark.parametrize(
    ("costs", "kinds", "stages", "expected"),
    [
        (Costs(F=(1.0, 2.0), I=(3.0, 4.0), W=5.0), "FB", (0, 1), 1 + 9),
        (Costs(F=(1.0, 2.0), I=(3.0, 4.0), W=5.0), "FI", (1, 0), 2 + 3),
        (Costs(F=2.0, I=3.0, W=1.0, FB=(4.5, 5.5)), "FB", (0, 1), 4.5),
        (Costs(F=2.0, I=3.0, W=1.0, FB=(4.5, 5.5)), "FB", (1, 0), 5.5),
        (Costs(F=2.0, I=3.0, W=1.0, FB=(4.5, 5.5)), "FI", (0, 1), 3.5),
        (Costs(F=3.0, I=2.0, W=2.0, FB=4.0), "FI", (0, 1), 3),
        (Costs(F=3.0, I=2.0, W=(2.0, 5.0), FB=4.0), "IW", (0, 1), 7),
    ],
)
def test_the_cost_of_a_pair(costs: Costs, kinds: str, stages: tuple[int, int], expected: float) -> None:
    assert pair(costs.resolved(2), kinds, *stages) == expected
