"""A record is taken for other sizes by one rule, which leaves a record of these sizes as it is."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.cell.recorded_rows import RecordedRows
from schedc.cell.taken_rows import taken_for
from schedc.ir.arrays import Int64

LAYERS, MICROBATCHES, RANKS, EXPERTS, ROWS = 3, 4, 2, 8, 60


def record(steps: int = 2, seed: int = 0) -> RecordedRows:
    """Every rank has as many rows in every microbatch."""
    share = np.random.default_rng(seed).dirichlet(np.full(EXPERTS, 0.5), (steps, LAYERS, MICROBATCHES, RANKS))
    drawn = np.random.default_rng(seed).multinomial(ROWS, share)
    return RecordedRows.of_experts("r.npz", np.asarray(drawn, np.int32))


def by_expert(taken: RecordedRows) -> Int64:
    assert taken.by_expert is not None
    return np.asarray(taken.by_expert, np.int64)


@pytest.mark.parametrize("rows", [None, ROWS])
def test_a_record_of_the_sizes_is_itself(rows: int | None) -> None:
    known = record()
    assert taken_for(known, LAYERS, MICROBATCHES, RANKS, rows) is known
    assert known.known is None


@pytest.mark.parametrize("sizes", [(3, 4, 4, 60), (6, 9, 1, 60), (2, 3, 8, 90), (3, 4, 2, 240), (5, 16, 4, 7)])
def test_ranks_have_the_rows_of_the_plan(sizes: tuple[int, int, int, int]) -> None:
    known, (layers, microbatches, ranks, rows) = record(), sizes
    taken = taken_for(known, *sizes)
    assert (taken.shape[0], taken.microbatches, taken.shape[2]) == (layers, microbatches, ranks)
    assert taken.factors.shape == (layers, microbatches, ranks)
    assert (by_expert(taken).sum(-1) == rows).all()
    assert taken.known == (LAYERS, MICROBATCHES, RANKS, ROWS)
    assert taken.of_step == sizes
    assert taken != known
    again = taken_for(record(), *sizes)
    assert np.array_equal(by_expert(again), by_expert(taken))
    assert again == taken


def test_cells_are_those_of_the_record() -> None:
    """Layers are spread, microbatches repeat, and ranks beyond those of the record are other microbatches."""
    known = record()
    rows = by_expert(known)
    taken = taken_for(known, 6, 10, 4, ROWS)
    whole = np.stack([taken.repeated(step) for step in by_expert(taken)])
    for layer in range(6):
        for microbatch in range(10):
            for rank in range(4):
                expected = rows[:, layer // 2, (microbatch + rank // 2) % 4, rank % 2]
                assert np.array_equal(whole[:, layer, microbatch, rank], expected), (layer, microbatch, rank)
    assert np.array_equal(taken.over_step(by_expert(taken)[0, 1]), whole[0, 1].sum(0))


def test_longer_microbatches_are_several_of_the_record() -> None:
    known = record()
    taken = taken_for(known, LAYERS, 5, RANKS, 2 * ROWS)
    rows = by_expert(known)
    assert np.array_equal(by_expert(taken), rows[:, :, ::2] + rows[:, :, 1::2])
    assert taken.microbatches == 5
    uneven, shared = (each.factors.max(axis=2).mean() for each in (known, taken))
    assert shared < uneven  # they spread less


def test_rows_are_shared_within_one() -> None:
    """Neighbouring experts together are within one as well, however many they are."""
    known = record()
    rows = by_expert(known)
    for total in (7, 59, 61, 89):
        taken = by_expert(taken_for(known, LAYERS, MICROBATCHES, RANKS, total))
        error = taken.cumsum(-1) - rows.cumsum(-1) * total / ROWS
        assert (error <= 0).all()
        assert (error > -1).all()


def test_cells_without_rows_stay_empty() -> None:
    rows = np.zeros((1, 1, 2, 2, 4), np.int32)
    rows[..., 1] = 12
    rows[0, 0, 1, 1] = 0
    taken = by_expert(taken_for(RecordedRows.of_experts("r.npz", rows), 1, 2, 2, 10))
    assert taken[0, 0, ..., 1].tolist() == [[10, 10], [10, 0]]
    assert taken.sum() == 30
