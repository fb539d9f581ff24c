"""A run on packed rows stops inside a window and goes on with other replicas: same samples, and the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.data.packed_runs import CUT, END, undisturbed
from schedc_runtime.testing import pool
from support import row_cases
from support.sweeps import in_sweeps

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@in_sweeps(
    "runtime/keeper/test_kept_jobs.py::test_a_run_goes_on_with_fewer_replicas_and_the_same_batch",
    "runtime/data/test_rows.py::test_checkpoints_keep_the_place",
)
def test_a_run_goes_on_in_a_window_with_other_replicas(tmp_path: Path) -> None:
    """Two replicas of two stages, then one of four: against one process whose microbatches have a row each."""
    ranks = pool(4).run("runtime.data.packed_runs:rank_of_runs", timeout=240, folder=str(tmp_path))
    documents, gradients = undisturbed()
    for facts in ranks:
        assert [step["step"] for step in facts] == list(range(END))
        assert [step["documents"] for step in facts] == documents
    for step in range(END):
        orders = {facts[step]["replica"]: facts[step]["order"] for facts in ranks}
        assert all(facts[step]["order"] == orders[facts[step]["replica"]] for facts in ranks)
        assert any(order != sorted(order) for order in orders.values())
        assert len(orders) == (2 if step < CUT else 1)
        everyone = [torch.load(path) for path in tmp_path.glob(f"{step} *.pt")]
        assert len(everyone) == 4
        for name, grad in gradients[step].items():
            held = [grads[name] for grads in everyone if name in grads]
            assert len(held) == len(orders)
            assert all(row_cases.farthest({name: each}, {name: grad}) < row_cases.EQUAL for each in held), (step, name)
