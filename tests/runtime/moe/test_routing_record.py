"""A recorded routing: rows by step, layer, microbatch and rank, as a cost file takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from schedc.cell.rows import read_recording
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from support.expert_cases import batch_of, compiled, model
from support.runtime_cases import next_token_loss

LINES = """  experts 8 top 2 width 4 hidden 8
  topology nodes 1 x 2
  tokens 6"""


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks", "recompute"), [("1f1b", 2, "recompute all full"), ("dualpipev", 1, "")])
def test_rows_are_those_of_the_routers(tmp_path: Path, schedule: str, ranks: int, recompute: str) -> None:
    """Each token has two rows; a step in eval, or without gradients, is not recorded."""
    program = compiled(schedule, {"P": ranks, "M": 2}, f"{LINES}\n  {recompute}")
    batch, targets = batch_of(program, 2)
    pipe = Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, example=batch[:1])
    with pipe.record_routing() as record:
        pipe.step(batch, targets)
        pipe.evaluate(batch, targets)
        pipe.step(batch, targets)
    pipe.step(batch, targets)
    rows = np.array(record.rows())
    assert rows.shape == (2, 3, 2, 2)
    assert (rows.sum(axis=3) == 2 * 2 * batch.shape[1]).all()
    assert np.array_equal(rows[0], rows[1])  # the same weights
    record.save(tmp_path / "routing.json")
    recording = read_recording(tmp_path / "routing.json", "routing.json")
    assert not isinstance(recording, str)
    assert np.array_equal(np.frombuffer(recording.data).reshape(recording.shape), rows[-1])


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
    assert np.array_equal(np.array(record.rows())[:, :, [2, 0, 3, 1]], np.array(permuted.rows()))


def test_nothing_recorded_is_an_error() -> None:
    program = compiled("1f1b", {"P": 1, "M": 1}, LINES)
    batch, targets = batch_of(program, 2)
    pipe = Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, example=batch[:1])
    with pipe.record_routing() as record:
        pipe.evaluate(batch, targets)
    with pytest.raises(RuntimeFault, match="no whole step"):
        record.rows()
