"""Checkpoints that disks or strangers have changed: `benchmarks/resilience.py` has all cases, here are some of each."""

from __future__ import annotations

import pytest

from support.damaged_checkpoints import flips
from support.full_disks import full
from support.hostile_checkpoints import ALTERATIONS, hostile


@pytest.mark.processes
@pytest.mark.slow
def test_damage_is_found_in_its_place_and_the_step_before_is_taken() -> None:
    figures = flips(bits=12, cuts=6, every=4)
    assert figures["failures"] == []
    assert figures["cases"] == figures["found"] > 50
    assert figures["resumed"] == 11


@pytest.mark.parametrize("may_mount", [True, False])
def test_a_full_disk_leaves_what_is_committed(may_mount: bool) -> None:
    figures = full(6, may_mount)
    assert figures["failures"] == []
    assert figures["cases"] == 7
    assert may_mount or figures["disk"] == "limit"


@pytest.mark.slow
def test_strangers_checkpoints_do_nothing() -> None:
    figures = hostile(3 * len(ALTERATIONS))
    assert figures["failures"] == []
    assert figures["refused"] > figures["cases"] // 2
    assert figures["refused"] + figures["read"] == figures["cases"]
