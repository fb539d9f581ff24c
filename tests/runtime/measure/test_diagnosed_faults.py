"""Traces of real ranks with a fault; words `diagnose` and `kineto` of `benchmarks/resilience.py` have more of them."""

from __future__ import annotations

import sys

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from diagnosis import Faults, diagnosed_cases
from diagnosis_ranks import Fault, Setting

from support.sweeps import swept

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("setting", "faults"),
    [
        (
            Setting("ours", "zbv", ranks=3, microbatches=6, seconds=0.03),
            {
                "rank": (Fault(rank=1), "rank 1 = others"),
                "link": (Fault(link=(1, 0), delay=0.05), "link 1>0 = others"),
            },
        ),
        *swept(
            [
                (
                    Setting("ours", "1f1b", ranks=2, microbatches=4, seconds=0.03),
                    {"snapshots": (Fault(saving=0.02), "snapshots = none")},
                ),
                (Setting("torch", "1F1B", ranks=3, microbatches=4), {"rank": (Fault(rank=1), "rank 1 = others")}),
            ],
            [],
        ),
    ],
)
def test_a_fault_of_real_ranks_is_first_and_its_gain_is_near(setting: Setting, faults: Faults) -> None:
    for case in diagnosed_cases(setting, faults, rounds=1):
        assert case.first == case.wanted
        assert case.residual < 0.02
        assert case.points < 6, "on a busy machine two single steps differ by some points"
