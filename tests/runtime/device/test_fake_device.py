"""Whole steps on fake tensors of another device: nothing lies on the host, and the host asks nothing in between."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.paths import ROOT
from support.warm_command import run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed() -> Any:
    """What a process without a backward before it prints of three steps."""
    done = run_python(["-m", "runtime.device.fake_cases"], ROOT / "tests")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_of_static_shapes_stays_on_its_device(printed: Any) -> None:
    """`benchmarks/device.py rules` runs four schedules, padded and bounded."""
    assert printed["static"] == []


def test_an_index_on_the_host_is_found(printed: Any) -> None:
    _, text = printed["on_host"]
    assert "0F0" in text
    assert "tensor's device must be `meta`, got cpu" in text  # as fakes call it in an operation of gradients


def test_a_question_inside_an_instruction_is_found(printed: Any) -> None:
    """Exact routes ask for the sizes of their exchanges."""
    assert "moe/sizes.py" in printed["inside"][0]
    assert "in stage 0, rank 0" in printed["inside"][0]
