"""Bound code and registers by themselves: calls woven in, values with one consumer, sums finished in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import schedc
from schedc_runtime.execute.code import BoundStep, Code
from schedc_runtime.execute.registers import Registers
from schedc_runtime.transport.in_process import InProcessNetwork

PROGRAM = schedc.compile("1f1b", P=2, M=2)


def nothing(registers: Registers, operands: Any) -> None:
    """A handler."""


def code_of(rank: int) -> Code:
    """One step per row of a rank's stream."""
    start = int(PROGRAM.rank_start[rank])
    steps = [
        BoundStep(nothing, f"operands {i}", start + i, 1, instruction, "part" if i == 1 else "")
        for i, instruction in enumerate(PROGRAM.instructions(rank))
    ]
    return Code(steps, ["a value"], 0, {})


def test_calls_are_woven_in_around_their_steps() -> None:
    code = code_of(1)
    woven = code.woven(
        {1: [(nothing, "first"), (nothing, "second")]}, {1: [(nothing, "third")], 2: [(nothing, "last")]}
    )
    operands = [operands for _, operands in woven.calls[:7]]
    assert operands == ["operands 0", "first", "second", "operands 1", "third", "operands 2", "last"]
    assert len(woven.steps) == len(code.steps) + 4
    added = [step for step in woven.steps if step not in code.steps]
    assert [(step.row, step.width, step.label) for step in added] == [
        (step.row, 1, "beside") for step in (code.steps[1], code.steps[1], code.steps[1], code.steps[2])
    ]
    assert added[0].instruction is code.steps[1].instruction
    assert code.calls == [(step.handler, step.operands) for step in code.steps]  # the code itself is as it was


def registers(slots: int = 2, handles: int = 1) -> Registers:
    names = [f"value {i}" for i in range(slots)]
    return Registers(names, handles, InProcessNetwork(1).transport(0), torch.device("cpu"))


def test_a_value_has_one_consumer() -> None:
    state = registers()
    state.values[1] = (1, 2)
    assert state.take(1) == (1, 2)
    with pytest.raises(LookupError, match="the program uses value 1 before it is there"):
        state.take(1)


def test_what_a_step_leaves_behind_is_named_until_it_is_reset() -> None:
    state = registers()
    with pytest.raises(LookupError, match="waits for a message that it has not posted"):
        state.posted(0)
    state.values[0], state.handles[0] = "x", "handle"
    assert state.posted(0) == "handle"
    assert state.leftovers() == ["value 0", "message 0"]
    state.reset()
    assert state.leftovers() == []


class Sum:
    """A pending sum whose readiness the test sets; it logs when it is finished."""

    def __init__(self, name: str, log: list[str], ready: bool) -> None:
        self.name, self.log, self.is_ready = name, log, ready

    def ready(self) -> bool:
        return self.is_ready

    def finish(self) -> None:
        self.log.append(self.name)


def test_sums_are_finished_in_the_order_in_which_they_were_started() -> None:
    state, log = registers(), []
    first, second, third = Sum("first", log, True), Sum("second", log, False), Sum("third", log, True)
    state.pending += [first, second, third]
    assert not state.finish_sums()
    assert log == ["first"]
    second.is_ready = True
    assert state.finish_sums()
    assert log == ["first", "second", "third"]
    assert state.pending == []
