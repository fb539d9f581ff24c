"""The frontier: each point is what `schedc check` says, floors end where waves are, and other costs are refused."""

from __future__ import annotations

import pytest

from support.commands import facts_of, schedc
from support.needs import needed
from support.sweeps import halved

COSTS = ("--cost", "I=1.2", "--cost", "W=0.8", "--cost", "p2p=0.025")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("costs", halved([(), COSTS]))
def test_every_point_is_what_check_says_in_chunks(costs: tuple[str, ...]) -> None:
    facts = facts_of("frontier", "-D", "P=2", "-D", "M=4", *costs)
    assert len({point["schedule"] for point in facts["points"]}) >= 20
    for point in facts["points"]:
        v = point["per_rank"]
        checked = facts_of(*point["command"].split()[1:])
        assert (f" --cost p2p={0.025 * v:.12g}" in point["command"]) == bool(costs)
        busy = [checked["makespan"] - bubble for bubble in checked["bubble"]]
        assert point["bubble"] * v == pytest.approx(checked["makespan"] - max(busy)), point
        assert point["memory"] * v == pytest.approx(max(checked["peak_memory"])), point
        assert max(busy) / v == pytest.approx(12), point  # 4 microbatches of F + I + W, whatever v is


@pytest.mark.slow
def test_floors_end_where_waves_are_and_fall_with_memory() -> None:
    facts = facts_of("frontier", "-D", "P=4", "-D", "M=8")
    waves = {point["per_rank"]: point for point in facts["points"] if point["schedule"] == "zb_wave"}
    for line in facts["floors"]:
        v = line["per_rank"]
        assert line["bubble"] == sorted(line["bubble"], reverse=True)
        assert line["memory"][-1] == 4
        assert line["bubble"][-1] == pytest.approx(3 / v)
        if v > 1:
            assert (waves[v]["memory"], waves[v]["bubble"]) == (4, pytest.approx(3 / v))
    assert [line["per_rank"] for line in facts["floors"]] == [1, 2, 4]
    for point in facts["points"]:  # no order with a split backward on one copy is below its line
        for line in facts["floors"]:
            if (point["copies"], point["per_rank"]) == (1, line["per_rank"]):
                caps = zip(line["memory"], line["bubble"], strict=True)
                assert point["bubble"] >= min(bubble for cap, bubble in caps if cap <= max(point["memory"], 1)) - 1e-9
    front = {point["command"] for point in facts["points"] if point["on_front"]}
    assert any("vhalf" in each for each in front)
    assert not any("gpipe" in each for each in front)


@pytest.mark.slow
def test_searched_cells_are_within_their_cap_and_not_below_their_floor() -> None:
    needed("ortools")
    facts = facts_of("frontier", "-D", "P=2", "-D", "M=4", "--time", "8")
    lines = {line["per_rank"]: dict(zip(line["memory"], line["bubble"], strict=True)) for line in facts["floors"]}
    found = [point for point in facts["points"] if point["found"]]
    searched = [cell for cell in facts["searched"] if cell["bubble"] is not None]
    assert [point["bubble"] for point in found] == [cell["bubble"] for cell in searched]
    for cell, point in zip(searched, found, strict=True):
        assert point["memory"] <= cell["memory"] + 1e-9
        assert cell["bound"] <= cell["bubble"] + 1e-9
        assert lines[cell["per_rank"]].get(cell["memory"], 0) <= cell["bubble"] + 1e-9
        assert cell["proven"] == (cell["bubble"] == pytest.approx(cell["bound"]))
    assert (2, 1.5) in {(cell["per_rank"], cell["memory"]) for cell in searched if cell["proven"]}
    left = {(cell["per_rank"], cell["memory"]) for cell in facts["not_searched"]}
    assert (1, 1.0) in left
    assert not left & {(cell["per_rank"], cell["memory"]) for cell in searched}


@pytest.mark.slow
def test_floors_of_waves_are_missing_by_name_where_no_wave_is_legal() -> None:
    facts = facts_of("frontier", "-D", "P=4", "-D", "M=10")
    assert facts["floors_missing"] == [2, 4]
    assert "no floor for v = 2, 4" in schedc("frontier", "-D", "P=4", "-D", "M=10").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-D", "w=2"), "the sizes are P and M"),
        (("-D", "P=64"), "P is from 2 to 16"),
        (("-D", "P=2", "-D", "M=2", "--cost", "F=1,2"), "not of `F`"),
        (("-D", "P=2", "-D", "M=2", "--cost", "B=3"), "not of `B`"),
        (("-D", "P=2", "-D", "M=2", "--cost", "activation=2"), "not of `activation`"),
    ],
)
def test_what_does_not_scale_with_stages_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = schedc("frontier", *arguments)
    assert result.exit_code == 2
    assert said in result.output
