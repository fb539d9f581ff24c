"""An audit on processes: tensors travel between ranks, and all of them raise the same."""

from __future__ import annotations

import pytest

from schedc_runtime.testing import pool
from support.audit_cases import Outcome
from support.sweeps import in_sweeps

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@in_sweeps("runtime/audit/test_audit.py::test_flips_that_change_what_is_sent_are_named")
def test_flips_on_processes_are_named_by_every_rank(tmp_path):
    answers = pool(4).run("support.audit_cases:flips_on_ranks", count=9, folder=str(tmp_path), timeout=120.0)
    assert all(answer == answers[0] for answer in answers)
    outcomes = [Outcome(*each) for each in answers[0]]
    assert [outcome for outcome in outcomes if outcome.changed != outcome.named] == []
    assert sum(outcome.changed for outcome in outcomes) >= 4
    assert (next(tmp_path.iterdir()) / "evidence.json").is_file()
