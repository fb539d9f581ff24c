"""Every broken invariant of a schedule is found, at its place; and nothing is found in an order that is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.diagnostics import CompilerBug, Diagnostic
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement, linear, v_shape
from schedc.ir.schedule import Schedule
from schedc.ir.verify import SHOWN, verify
from support import orders
from support.sweeps import swept


def positions(*lines: str, place: Placement | None = None) -> list[tuple[str, int, int]]:
    return [d.position for d in findings(*lines, place=place)]


def findings(*lines: str, place: Placement | None = None) -> list[Diagnostic]:
    return verify(orders.schedule(lines, place or linear(len(lines), 2)))


RIGHT = "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0F0 0B0 0F1 0B1", []),
        ("0F0 0B0 0F1 0I1 0W1", []),
        ("0F0 (0F1;0B0) 0B1", []),
        ("0F0 0B0 0F2 0B1", [("S201", 1, 9)]),
        ("0F0 0B0 5F1 0B1", [("S201", 1, 9)]),
        ("0F0 0B0 1F1 0F1 0B1", [("S202", 1, 9), ("S205", 2, 9), ("S204", 1, 9)]),
        ("0F0 0B0 0B1", [("S203", 1, 9)]),  # no F1: at its B1
        ("0F0 0B0 0F1", [("S203", 1, 9)]),  # no B1: at its F1
        ("0F0 0B0", [("S203", 1, 1), ("S203", 1, 5)]),  # nothing of microbatch 1: at the last of each kind
        ("0F0 0B0 0F1 0I1", [("S203", 1, 13)]),  # no W1: at its I1
        ("0F0 0F1 0W1 0B0", [("S203", 1, 9)]),  # a W is no backward
        ("0F0 0B0 0B1 0F1", [("S204", 1, 9)]),
        ("0F0 0B0 0F1 0W1 0I1", [("S204", 1, 13)]),
        ("0F0 0B0 (0F1;0B1)", [("S204", 1, 14)]),
        ("0F0 0F0 0B0 0F1 0B1", [("S205", 1, 5)]),
        ("0F0 0B0 0F1 0B1 0I1 0W1", [("S205", 1, 17)]),
        ("0F0 0B0 0F1 (0B1;0F0)", [("S205", 1, 18), ("S206", 1, 14)]),
        ("0F0 0B0 0F1 0B1 0W1", [("S207", 1, 17)]),
        ("0F0 0I0 (0F1;0W0) 0B1", []),
        ("0F0 0I0 0F1 (0I1;0W0) 0W1", []),
        ("(0F0;0W0) 0I0 0F1 0B1", [("S208", 1, 6)]),  # the F's own W
        ("0F0 (0F1;0W0) 0I0 0B1", [("S208", 1, 10)]),  # before its I
        ("0F0 (0I0;0W0) 0F1 0B1", [("S208", 1, 10)]),  # beside its I
        ("0F0 0I0 (0W0;0F1) 0B1", [("S206", 1, 10)]),
    ],
)
def test_each_invariant(line: str, expected: list[tuple[str, int, int]]) -> None:
    assert positions(line, RIGHT) == expected


def test_a_paired_weight_gradient_too_early_is_told_the_order_that_would_do() -> None:
    (finding,) = findings("(0F0;0W0) 0I0 0F1 0B1", RIGHT)
    assert finding.message == "weight gradient of microbatch 0 on stage 0 runs before its input gradient"
    assert finding.help == "run 0I0 before the pair: 0W0 fits beside an F or an I behind it"
    (finding,) = findings("0F0 (0I0;0W0) 0F1 0B1", RIGHT)
    assert "overlaps its input gradient" in finding.message


def test_neighbouring_stages_of_one_rank_hand_over_in_order() -> None:
    rank0 = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1"
    place = v_shape(2, 2)
    assert positions(rank0, "1F0 1F1 2F0 2F1 2B0 1B0 2B1 1B1", place=place) == []
    assert positions(rank0, "1F0 2F1 2F0 1F1 2B0 1B0 2B1 1B1", place=place) == [("S204", 2, 5)]
    assert positions(rank0, "1F0 1F1 2F0 2F1 1B0 2B0 2B1 1B1", place=place) == [("S204", 2, 17)]


def test_a_finding_shows_both_places_and_where_it_is() -> None:
    (found,) = findings("0F0 0B0 0B1 0F1", RIGHT)
    assert found.message == "full backward of microbatch 1 on stage 0 runs before its forward"
    assert found.primary.text == "this full backward (rank 0, P = 2, M = 2)"
    assert [(label.span.column, label.text) for label in found.secondary] == [(13, "its forward is here")]


def test_many_findings_are_counted_and_each_place_is_shown_once() -> None:
    line = " ".join(f"0B{m} 0F{m}" for m in range(9))
    found = verify(orders.schedule([line], linear(1, 9)))
    assert [d.position for d in found] == [("S204", 1, 1 + 8 * k) for k in range(SHOWN)]
    assert found[-1].notes == (f"and {9 - SHOWN} more like this",)
    schedule = orders.schedule([line], linear(1, 9))
    one_place = replace(schedule, span=np.zeros_like(schedule.span))
    assert [d.notes for d in verify(one_place)] == [("and 8 more like this",)]


def test_absurdly_many_missing_microbatches_take_no_memory() -> None:
    found = verify(orders.schedule(["0F0 0B0", "1F0 1B0"], linear(2, 2_000_000_000)))
    assert {d.code for d in found} == {"S203"}
    assert "3999999997 more" in found[-1].notes[-1]


def test_a_rank_without_ops() -> None:
    found = verify(orders.schedule(["0F0 0B0", ""], linear(2, 1)))
    assert [(d.code, d.notes) for d in found] == [
        ("S203", (f"rank 1 runs no {what} of stage 1 at P = 2, M = 1",)) for what in ("forward", "backward")
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"stage": np.zeros(3, np.int32)},
        {"rank_start": np.array([0, 9, 8])},
        {"rank_start": np.array([0, 8])},
        {"kind": np.full(8, len(OpKind), np.int8)},
        {"phase": np.ones(8, np.int32)},
        {"span": np.full(8, -1, np.int32)},
        {"pair": np.array([5, -1, 5, -1, -1, -1, -1, -1], np.int32)},
        {"pair": np.array([5, 5, 5, 5, -1, -1, -1, -1], np.int32)},
        {"pair": np.array([-1, -1, -1, 5, 5, -1, -1, -1], np.int32)},
    ],
)
def test_inconsistent_columns_are_our_fault(change: dict[str, object]) -> None:
    with pytest.raises(CompilerBug, match="bug in elaborate"):
        verify(replace(orders.schedule(["0F0 0B0 0F1 0B1", RIGHT], linear(2, 2)), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("file", sorted(f.stem for f in orders.FOLDER.glob("*.csv")))
def test_published_orders_are_legal(file: str) -> None:
    assert verify(orders.published(file)) == []


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(150, 60))
@given(orders.orders(legal=True), st.data())
def test_no_mutation_of_a_legal_order_passes_unseen(schedule: Schedule, data: st.DataObject) -> None:
    """Drop, double or rename an op of a schedule without pairs: verify says which invariant broke."""
    plain = replace(schedule, pair=np.full(len(schedule), -1, np.int32))
    assert verify(plain) == []
    row = data.draw(st.integers(0, len(plain) - 1))
    kind, columns = OpKind(int(plain.kind[row])), ("kind", "stage", "microbatch", "pair", "phase", "span")

    def with_rows(rows: np.ndarray) -> Schedule:  # type: ignore[type-arg]
        counts = np.bincount(plain.rank[rows], minlength=plain.ranks)
        taken = {name: getattr(plain, name)[rows] for name in columns}
        return replace(plain, rank_start=np.concatenate([[0], np.cumsum(counts)]), **taken)

    everything = np.arange(len(plain))
    dropped = verify(with_rows(np.delete(everything, row)))
    without_i = {"S203", "S207"} if kind == OpKind.I else {"S203"}
    assert {d.code for d in dropped} <= without_i
    assert dropped
    assert {d.code for d in verify(with_rows(np.insert(everything, row, row)))} == {"S205"}
    other = OpKind.B if kind != OpKind.B else OpKind.I
    renamed = plain.kind.copy()
    renamed[row] = other
    assert verify(replace(plain, kind=renamed))
