"""torch's schedule CSV: writing, reading back, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schedc.diagnostics import DiagnosticError
from schedc.interchange.torch_csv import from_torch_csv, to_torch_csv
from support.needs import needed
from support.paths import ROOT

QUICKSTART = """0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,1F1,(1F2;1B0)OVERLAP_F_B,1I1,1F3,1W1,1B2,1B3
"""
TWO_PIPES = """0F0,1F1,1B1,0B0
1F0,1B0,0F1,0B1
"""


@pytest.mark.parametrize("text", [QUICKSTART, TWO_PIPES])
def test_what_is_read_is_written_again(text: str) -> None:
    assert to_torch_csv(from_torch_csv(text)) == text
    assert to_torch_csv(from_torch_csv(text.replace("\n", "\r\n").replace(",", ",,"))) == text


def test_the_placement_follows_from_the_forwards() -> None:
    one = from_torch_csv(QUICKSTART).placement
    assert (one.rank_of_stage.tolist(), one.first_microbatch, one.ranks) == ([[0, 1]], (0, 4), 2)
    two = from_torch_csv(TWO_PIPES).placement
    assert (two.rank_of_stage.tolist(), two.first_microbatch) == ([[0, 1], [1, 0]], (0, 1, 2))


def test_every_op_points_at_its_place_in_the_text() -> None:
    schedule = from_torch_csv(QUICKSTART, file="order.csv")
    row = int(np.flatnonzero(schedule.pair >= 0)[1])
    assert str(schedule.op(row)) == "1B0"
    assert (schedule.op(row).span.line, schedule.op(row).span.column) == (2, 9)
    assert schedule.source is not None
    assert schedule.source.line(2)[8:20] == "(1F2;1B0)OVE"


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("0F0,0Q0\n", ("S601", 1, 5)),
        ("0F0,0F0junk\n", ("S601", 1, 5)),
        ("0F0,\n0F99999999999\n", ("S601", 2, 1)),
        ("0F0, (0B0;0F1)OVERLAP_F_B\n", ("S601", 1, 6)),
        ("", ("S601", 1, 1)),
        ("0F0,0F1,0B1\n1F0,1B0,1B1\n", ("S602", 2, 9)),
        ("0F0,9F65535\n", ("S602", 1, 5)),
    ],
)
def test_anything_else_is_refused_at_its_place(text: str, position: tuple[str, int, int]) -> None:
    with pytest.raises(DiagnosticError) as error:
        from_torch_csv(text)
    assert error.value.diagnostics[0].position == position


def test_every_wrong_cell_is_reported_in_one_run() -> None:
    with pytest.raises(DiagnosticError) as error:
        from_torch_csv("0F0,x\ny,1F0\n")
    assert [d.position for d in error.value.diagnostics] == [("S601", 1, 5), ("S601", 2, 1)]


def test_torch_reads_what_we_write() -> None:
    schedules = needed("torch.distributed.pipelining.schedules")
    for line in to_torch_csv(from_torch_csv(QUICKSTART)).splitlines():
        assert [str(schedules._Action.from_str(cell)) for cell in line.split(",")] == line.split(",")


ORDERS = ROOT / "tests" / "support" / "published_orders"


@pytest.mark.parametrize("path", sorted(ORDERS.glob("*.csv")), ids=lambda path: path.stem)
def test_published_orders_round_trip(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert to_torch_csv(from_torch_csv(text)).splitlines() == text.splitlines()
