"""A recorded routing: rows by step, layer, microbatch, rank and expert, as a cost file takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from schedc.cell.recorded_rows import read_recording
from schedc.ir.arrays import Int32
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from support.expert_cases import batch_of, compiled, model
from support.runtime_cases import next_token_loss
from support.sweeps import swept

LINES = """  experts 8 top 2 width 4 hidden 8
  topology nodes 1 x 2
  tokens 6"""


def recorded(schedule: str, sizes: dict[str, int], lines: str = "", folder: Path | None = None) -> Int32:
    """Rows by expert of two steps with the same weights.

    Without further lines of a plan, a step in eval between them and one behind are run, which do not count.
    """
    program = compiled(schedule, sizes, f"{LINES}\n  {lines}", "3 dense 1")
    batch, targets = batch_of(program, 2)
    pipe = Pipeline(model(blocks=3), program, loss_fn=next_token_loss, in_process=True, example=batch[:1])
    with pipe.record_routing() as record:
        pipe.step(batch, targets)
        if not lines:
            pipe.evaluate(batch, targets)
        pipe.step(batch, targets)
    if not lines:
        pipe.step(batch, targets)
    rows = record.by_expert()
    assert np.array_equal(rows.sum(axis=3).reshape(*rows.shape[:3], 2, 4).sum(axis=4), np.array(record.rows()))
    if folder is not None:
        record.save(folder / "routing.npz")
        with pytest.raises(RuntimeFault, match=r"\.npz"):
            record.save(folder / "routing.json")
    return rows


RECORDED = [
    ("1f1b", {"P": 2, "M": 2}, ("recompute all full", "hot 2")),
    ("dualpipev", {"P": 1, "M": 2}, ("balance by microbatch",)),
    ("dualpipe", {"P": 2, "M": 4}, ("hot 2 by microbatch", "sizes bounded 1.25\n  products grouped or fallback")),
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "sizes", "lines"), swept(RECORDED, RECORDED[:1]))
def test_rows_are_those_of_the_routers(schedule: str, sizes: dict[str, int], lines: tuple[str, ...]) -> None:
    """Each token of a rank has two rows. Copies of experts, and steps that run again, change no row."""
    rows = recorded(schedule, sizes)
    batch, _ = batch_of(compiled(schedule, sizes, LINES), 2)
    assert rows.shape == (2, 2, sizes["M"], 2, 8)
    assert (rows.sum(axis=4) == 2 * batch.shape[1]).all()
    assert np.array_equal(rows[0], rows[1])  # the same weights
    for line in lines:
        assert np.array_equal(recorded(schedule, sizes, line), rows), line


@pytest.mark.slow
def test_a_saved_record_has_the_last_two_steps(tmp_path: Path) -> None:
    rows = recorded("1f1b", {"P": 2, "M": 2}, folder=tmp_path)
    recording = read_recording(tmp_path / "routing.npz", "routing.npz")
    assert not isinstance(recording, str)
    assert recording.by_expert is not None
    assert np.array_equal(recording.by_expert, rows)
    by_rank = rows[-1].sum(axis=2).reshape(2, 2, 2, 4).sum(axis=3)
    assert np.array_equal(np.frombuffer(recording.data).reshape(recording.shape), by_rank)


@pytest.mark.slow
def test_a_microbatch_has_the_rows_that_it_routes_alone() -> None:
    program = compiled("dualpipev", {"P": 1, "M": 4}, LINES)
    batch, targets = batch_of(program, 2)
    pipe = Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, example=batch[:1])
    with pipe.record_routing() as record:
        pipe.step(batch, targets)
    order = torch.tensor([2, 0, 3, 1])
    order = torch.cat([order, 4 + order])
    with pipe.record_routing() as permuted:
        pipe.step(batch[order], targets[order])
    assert np.array_equal(record.by_expert()[:, :, [2, 0, 3, 1]], permuted.by_expert())


def test_nothing_recorded_is_an_error() -> None:
    program = compiled("1f1b", {"P": 1, "M": 1}, LINES)
    batch, targets = batch_of(program, 2)
    pipe = Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, example=batch[:1])
    with pipe.record_routing() as record:
        pipe.evaluate(batch, targets)
    with pytest.raises(RuntimeFault, match="no whole step"):
        record.rows()
