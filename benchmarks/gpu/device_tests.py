"""Section `device_tests`: the tests that are marked `device`, which skip without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting
from gpu.state import ROOT

CLAIMS = (
    Claim(
        "the tests marked `device` pass",
        "one GPU; tests of several GPUs skip",
        (Bound("device_tests.passed", ">=", 10), Bound("device_tests.failed", "==", 0)),
        must=True,
    ),
)

FILES = (
    "tests/runtime/execute/test_cuda.py", "tests/runtime/offload/test_cuda_lanes.py",
    "tests/runtime/kernels/test_kernels.py",
)  # fmt: skip
"""The files that have such tests; a test of the project holds the list."""


def measure(setting: Setting) -> dict[str, Any]:
    if find_spec("pytest") is None:
        raise NotMeasured("no pytest: make setup")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "device", *FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    if not setting.gpu and done.returncode == 0:
        raise NotMeasured(f"no GPU: {counts.get('skipped', 0)} tests were collected, and skip")
    wrong = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    broken = bool(done.returncode) and not wrong
    return {
        "device_tests": {
            "passed": counts.get("passed", 0), "failed": wrong + broken, "skipped": counts.get("skipped", 0),
            "which": lines[:8] or done.stderr.splitlines()[-3:],
        }
    }  # fmt: skip
