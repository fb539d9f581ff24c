"""Whole steps on fake tensors of another device: nothing lies on the host, and the host asks nothing in between."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.moe import trees
from support.fake_device import PLANS, Asked, fake_step, host_asks

pytestmark = pytest.mark.slow


def test_a_step_of_static_shapes_stays_on_its_device() -> None:
    """`benchmarks/device.py rules` runs four schedules, padded and bounded."""
    assert host_asks("zbv", "bounded") == []


def test_an_index_on_the_host_is_found() -> None:
    on_host = patch.object(trees, "arange", lambda count, like: torch.arange(count))
    with on_host, pytest.raises(InstructionError, match="0F0") as error:
        fake_step(Asked(), "1f1b", PLANS["padded"])
    assert isinstance(error.value.__cause__, FakeTensorDeviceMismatchError)


def test_a_question_inside_an_instruction_is_found() -> None:
    """Exact routes ask for the sizes of their exchanges."""
    asked = Asked()
    with pytest.raises(InstructionError):  # zeros are no sizes
        fake_step(asked, "1f1b", "  alltoall flat\n")
    assert "moe/sizes.py" in asked.inside[0]
    assert "in stage 0, rank 0" in asked.inside[0]
