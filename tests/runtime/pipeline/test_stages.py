"""Stages of a program: stages that add, in I, the results of I."""

from __future__ import annotations

import pytest

import schedc
from schedc_runtime.pipeline.build.stages import weights_follow


@pytest.mark.parametrize("name", ["zbh1", "zbh2", "zbv", "vhalf", "vmin", "dualpipe", "zbh1_overlap"])
def test_weights_come_in_the_order_of_their_backwards(name: str) -> None:
    program = schedc.compile(name, P=4, M=12)
    assert all(weights_follow(program, stage) for stage in range(program.stages))


def test_stages_whose_weights_come_in_another_order_are_told_from_the_others() -> None:
    """Rank 0 of this schedule splits no backward. The others keep some Ws for the end, while Bs pass them."""
    program = schedc.compile("zbh1_late", P=4, M=8)
    assert [weights_follow(program, stage) for stage in range(4)] == [True, False, False, False]
