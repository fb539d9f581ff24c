"""The public names of both packages: short texts of large values, the library, and what is missing by name."""

from __future__ import annotations

import json
import subprocess
import sys

import schedc
from schedc.plan.passes import Step
from support.commands import schedc as command


def test_large_values_have_short_texts() -> None:
    program = schedc.compile("dualpipev", P=4, M=10)
    assert repr(program) == f"<Program dualpipev (P = 4, M = 10): 4 ranks, {len(program)} rows>"
    analysis = schedc.analyse("1f1b", {"P": 4, "M": 8})
    assert repr(analysis) == "<Step 1f1b (P = 4, M = 8): makespan 33, bubble ratio 0.2727>"
    assert repr(analysis.schedule) == "<Schedule 1f1b (P = 4, M = 8): 4 ranks, 64 rows>"
    assert repr(Step(None, {}, schedc.Costs())) == "<Step of an order, not priced>"


def test_the_library_is_what_the_command_lists() -> None:
    entries = json.loads(command("list", "--json").stdout)["schedules"]
    assert [entry._asdict() for entry in schedc.library()] == entries
    assert schedc.library()[0].sizes == {"P": 4, "M": 8}


def test_the_runtime_names_what_it_lacks() -> None:
    hidden = "import sys; sys.modules['torch'] = None\nimport schedc_runtime\nschedc_runtime.Pipeline"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "schedc_runtime.Pipeline needs torch: pip install 'schedc[runtime]'" in done.stderr.splitlines()[-1]
