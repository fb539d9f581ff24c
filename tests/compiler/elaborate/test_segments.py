"""Segments of microbatches: numbers, order on every stage, and limits."""

from __future__ import annotations

import pytest

from schedc.compiler import legal_schedule
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.syntax.parser import parse

LINEAR = "place linear"


def make(body: str, head: str = LINEAR, size: str = "k: segments = 3", **sizes: int) -> Schedule:
    """A schedule whose statements stand on line 2."""
    text = f"schedule a(P: ranks = 1, M: microbatches = 2, {size}) {{ {head} rank r {{\n{body}\n}} }}"
    return elaborate(parse(Source("test.sched", text)).schedules[0], sizes)


def cells(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(f"{op.kind.name}{op.microbatch}" for op in schedule.ops(rank))


def fault(body: str, head: str = LINEAR, size: str = "k: segments = 3", **sizes: int) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        make(body, head, size, **sizes)
    return caught.value.diagnostics[0]


def test_backwards_take_the_last_segment_of_each_microbatch_first() -> None:
    assert cells(make("repeat M*k { F } repeat M*k { B }")) == "F0 F1 F2 F3 F4 F5 B2 B1 B0 B5 B4 B3"
    assert cells(make("repeat M*k { F } repeat M*k { I } repeat M*k { W }", M=1)) == "F0 F1 F2 I2 I1 I0 W2 W1 W0"
    assert cells(make("repeat M*k { F } repeat M*k { B }", k=1)) == "F0 F1 B0 B1"


def test_named_segments_and_the_turns_they_leave() -> None:
    assert cells(make("repeat 6 { F } B @ 5 B B @ 1 B B B")) == "F0 F1 F2 F3 F4 F5 B5 B2 B1 B0 B4 B3"
    assert cells(make("repeat 3 { F } I I W @ 1 W I W", M=1)) == "F0 F1 F2 I2 I1 W1 W2 I0 W0"


def test_segments_belong_to_the_microbatches_of_each_pipe() -> None:
    head = "place pipes { down(M/2): stage s on rank s  up(M/2): stage s on rank P-1-s }"
    made = make("repeat k { F0 } repeat k { F1 } repeat k { B0 } repeat k { B1 }", head)
    assert cells(made) == "F0 F1 F2 F3 F4 F5 B2 B1 B0 B5 B4 B3"
    assert made.placement.first_microbatch == (0, 3, 6)


def test_an_order_for_more_microbatches_counts_whole_ones() -> None:
    made = make("repeat 3*k { F } repeat 3*k { B }", f"{LINEAR} order for 3", M=1)
    assert cells(made) == "F0 F1 F2 B2 B1 B0"


@pytest.mark.parametrize(
    ("body", "position", "said"),
    [
        ("F @ 1  F @ 0  F @ 2  repeat 3 { B }", ("S125", 2, 1), "forward of segment 1 of microbatch 0 on stage 0"),
        ("repeat 3 { F }  B @ 0  B @ 1  B @ 2", ("S125", 2, 17), "before the needed backward of segment 1"),
        ("repeat 3 { F }  I @ 2  I @ 0  I @ 1 repeat 3 { W }", ("S125", 2, 24), "backward of segment 0"),
    ],
)
def test_an_order_that_attention_forbids(body: str, position: tuple[str, int, int], said: str) -> None:
    found = fault(body, M=1)
    assert found.position == position
    assert said in found.message


def test_limits_and_roles() -> None:
    assert fault("", M=65_536, k=2).position == ("S113", 1, 47)
    assert fault("", k=0).code == fault("", k=65).code == "S113"
    assert fault("", size="k: segments = 2, j: segments = 2").position == ("S103", 1, 64)


def test_what_is_missing_is_left_to_the_checks_of_every_order() -> None:
    text = f"schedule a(P: ranks = 1, M: microbatches = 1, k: segments = 2) {{ {LINEAR} rank r {{ F @ 1 B @ 0 }} }}"
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(parse(Source("test.sched", text)).schedules[0], {})
    assert {d.code[:2] for d in caught.value.diagnostics} == {"S2"}
