"""The table of export targets: every row has a writer of its own, and the table starts nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.interchange.targets import TARGETS
from schedc.step.costs.costs import Costs


@pytest.mark.parametrize("name", TARGETS)
def test_row_names_a_writer_of_its_own(name: str) -> None:
    schedule = legal_schedule(open_input("1f1b"), {"P": 2, "M": 2})
    assert [row.writer for row in TARGETS.values()].count(TARGETS[name].writer) == 1
    assert TARGETS[name].purpose
    assert TARGETS[name].write(schedule, Costs()).endswith("\n")


def test_table_is_read_without_its_writers() -> None:
    """The command line reads the table at every start."""
    code = "import sys, schedc.interchange.targets; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
