"""Checkpoints that disks or strangers have changed: `benchmarks/resilience.py` has all cases, here are some of each."""

from __future__ import annotations

import pytest

from support.damaged_checkpoints import flips
from support.full_disks import full
from support.hostile_checkpoints import ALTERATIONS, hostile


def test_damage_is_found_in_its_place_and_the_step_before_is_taken() -> None:
    cases, failures, figures = flips(bits=12, cuts=6)
    assert failures == []
    assert cases == figures["found"] > 40


@pytest.mark.parametrize("may_mount", [True, False])
def test_a_full_disk_leaves_what_is_committed(may_mount: bool) -> None:
    cases, failures, _ = full(6, may_mount)
    assert failures == []
    assert cases == 7


def test_strangers_checkpoints_do_nothing() -> None:
    cases, failures, figures = hostile(3 * len(ALTERATIONS))
    assert failures == []
    assert figures["refused"] > cases // 2
    assert figures["refused"] + figures["read"] == cases
