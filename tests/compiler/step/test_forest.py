"""The closed form on the host keeps its promises, and is the plan of the device."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from schedc.ir.arrays import Int64
from schedc.step.costs.forest import NUMPY, Forest, forest_of, most_rows, rows_on_ranks


def test_the_example_of_the_file() -> None:
    """One expert a rank. Home 0 gives 117 to rank 2 and 36 to rank 1, and gets 24 from home 3."""
    forest = forest_of(np.array([[385], [220], [139], [280]]), Fraction(1))
    assert forest.parent.tolist() == [3, 0, 0, 3]
    assert forest.taken.tolist() == [24, 36, 117, 0]


@pytest.mark.parametrize(("ranks", "local"), [(1, 3), (2, 1), (3, 4), (8, 4), (32, 2)])
def test_promises_hold_for_any_rows(ranks: int, local: int) -> None:
    generator = np.random.default_rng(ranks)
    skewed = generator.random((400, ranks, local)) ** generator.integers(0, 25, (400, 1, 1))
    rows = (skewed * 10 ** generator.integers(0, 7, (400, 1, 1))).astype(np.int64)
    rows[::7] *= generator.random((len(rows[::7]), ranks, 1)) < 0.5
    for within in (Fraction(1), Fraction("1.01"), Fraction("1.2")):
        plan = forest_of(rows, within)
        computed = rows_on_ranks(NUMPY, rows, plan)
        assert (computed >= 0).all()
        assert np.array_equal(computed.sum(1), rows)
        assert (computed.sum((2, 3)) <= most_rows(NUMPY, rows.sum(2), within)).all()
        lent = computed.sum(3) * ~np.eye(ranks, dtype=bool)
        assert ((lent > 0).sum(2) <= 1).all()
        assert np.array_equal(lent.sum(2), plan.taken)
        _promises_within_slots(rows, within, plan)


def _promises_within_slots(rows: Int64, within: Fraction, whole: Forest) -> None:
    """Copies fit, and no rank has more rows than its limit or its own. A plan that fits is left as it is."""
    load = rows.sum(2)
    for slots in range(1, rows.shape[2]):
        plan = forest_of(rows, within, slots)
        computed = rows_on_ranks(NUMPY, rows, plan)
        assert (computed >= 0).all()
        assert ((plan.quota > 0).sum(2) <= slots).all()
        assert np.array_equal(plan.quota.sum(2), plan.taken)
        assert (plan.quota <= whole.quota).all()
        assert (computed.sum((2, 3)) <= np.maximum(load, most_rows(NUMPY, load, within))).all()
        fits = ((whole.quota > 0).sum(2) <= slots).all(1)
        assert np.array_equal(plan.quota[fits], whole.quota[fits])
        assert rows.shape[1] == 1 or slots > 1 or not fits.all()


def test_a_home_takes_no_rows_for_those_that_it_keeps() -> None:
    """Home 0 has four rows over its limit and two slots give two of them away. It takes none of home 1."""
    rows = np.array([[26, 26, 26, 26], [103, 0, 0, 0], [0, 0, 93, 0]])
    assert forest_of(rows, Fraction(1)).taken.tolist() == [3, 0, 7]
    plan = forest_of(np.array([[1] * 104, [103] + [0] * 103, [93] + [0] * 103]), Fraction(1), 2)
    assert plan.taken.tolist() == [0, 0, 2]
