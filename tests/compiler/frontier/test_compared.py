"""Compared schedules: figures are those of `schedc check` in chunks, and winners are the least of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.load.library import load
from support.commands import facts_of, schedc
from support.door_cases import is_checked

NAMES = ("1f1b", "zbv", "vhalf", "zb_wave", "dualpipe", "dualpipev", "zb_greedy")


def test_rows_and_winners_are_what_check_says() -> None:
    facts = facts_of("compare", *NAMES, "-D", "P=4", "-D", "M=8", "--cost", "p2p=0.05", "--cost", "W=0.5")
    rows = {row["schedule"]: row for row in facts["schedules"]}
    for name, row in rows.items():
        assert is_checked(row), name
        assert row["bubble_ratio"] == pytest.approx(row["bubble"] / row["makespan"]), name
    # forward and backward of 8 microbatches; a V turns once and a wave of two Vs three times without a message
    sent = {"1f1b": 2 * 8 * 3, "zbv": 2 * 8 * (7 - 1), "zb_wave": 2 * 8 * (15 - 3), "dualpipe": 2 * 8 * 3}
    assert {name: rows[name]["messages"] for name in sent} == sent
    assert [rows["dualpipe"]["copies"], rows["zbv"]["copies"]] == [2, 1]
    assert "split backward" not in rows["1f1b"]["needs"]
    assert {"split backward", "4 stages on a rank", "M % P == 0"} <= set(rows["zb_wave"]["needs"])
    for entry in facts["best_by_memory"]:
        fit = [row for row in rows.values() if row["memory"] <= entry["memory"] + 1e-9]
        assert rows[entry["schedule"].split()[0]]["makespan"] == min(row["makespan"] for row in fit)
    assert len(facts["best_by_memory"]) > 1


def test_all_costs_of_check_count(tmp_path: Path) -> None:
    costs = tmp_path / "costs.toml"
    costs.write_text('schema = "schedc.costs/1"\n[ops]\nF = 2\nB = 5\nFB = 6\n[memory]\nactivation = 3\n')
    facts = facts_of("compare", "dualpipev", "1f1b", "-D", "P=4", "-D", "M=8", "--cost-file", str(costs))
    assert all(is_checked(row) for row in facts["schedules"])
    assert facts["costs"] == {"F": 2, "I": 1, "W": 1, "B": 5, "FB": 6, "activation": 3}
    for refused in ("dp=1", "F=1,2,3,4", "microbatches=1,2,3,4,5,6,7,8"):
        answer = schedc("compare", "1f1b", "-D", "P=4", "-D", "M=8", "--cost", refused)
        assert (answer.exit_code, f"`{refused.partition('=')[0]}`" in answer.stderr) == (2, True), refused


def test_cells_are_priced_from_inside_with_the_layers_of_a_rank(tmp_path: Path) -> None:
    cells = "examples/costs/cells.toml"
    asked = ("-D", "P=4", "-D", "M=8", "--cost-file", cells)
    rows = {row["schedule"]: row for row in facts_of("compare", "dualpipe", "dualpipev", "1f1b", *asked)["schedules"]}
    halved = tmp_path / "halved.toml"
    halved.write_text(Path(cells).read_text(encoding="utf-8").replace("moe*4", "moe*2"), encoding="utf-8")
    for name, file in {"dualpipe": cells, "1f1b": cells, "dualpipev": str(halved)}.items():
        checked = facts_of("check", name, *asked[:4], "--cost-file", file)["cells"]
        assert rows[name]["makespan"] == checked["makespan"]["inside"], name
        # all ranks compute as much, so that what a rank computes is the mean share
        computed = checked["shares"]["compute"] * rows[name]["makespan"]
        assert rows[name]["bubble"] == pytest.approx(rows[name]["makespan"] - computed), name
    assert [rows[name]["stages"] for name in ("dualpipe", "dualpipev")] == ["moe*4", "moe*2"]
    assert "are not 8 equal stages" in schedc("compare", "zb_wave", "-D", "w=4", *asked).stdout


def test_a_condition_says_what_its_names_mean() -> None:
    (row,) = facts_of("compare", "interleaved_1f1b", "-D", "P=4", "-D", "M=8")["schedules"]
    assert row["needs"][-1] == "M % rounds == 0 where rounds = max(1, M // P)"


@pytest.mark.slow
def test_winners_by_latency_are_those_of_steps_at_that_latency() -> None:
    facts = facts_of("compare", *NAMES, "-D", "P=4", "-D", "M=8", "--memory", "4")
    winners = [entry["schedules"] for entry in facts["best_by_latency"]]
    assert winners[0] == ["zb_wave (w = 2)"]
    assert winners[-1] != winners[0]  # four messages for each of a line weigh more
    assert {row["schedule"] for row in facts["schedules"] if not row["fits"]} == {"dualpipe", "dualpipev", "zb_greedy"}
    for entry in facts["best_by_latency"]:
        costs = ("--cost", f"p2p={entry['p2p']}")
        at = facts_of("compare", *NAMES, "-D", "P=4", "-D", "M=8", *costs, "--memory", "4")["schedules"]
        least = min(row["makespan"] for row in at if row["fits"])
        assert entry["schedules"] == [row["title"] for row in at if row["fits"] and row["makespan"] <= least + 1e-9]


def test_what_is_not_legal_is_told_beside_the_others(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    result = schedc("compare", "zb_wave", "1f1b", "seq1f1b", "-D", "P=4", "-D", "M=6", "-o", str(page))
    assert result.exit_code == 1
    assert "zb_wave" in result.stdout.split("requires M % P == 0")[0]
    assert "segments of a sequence" in result.stdout
    assert "shortest from memory 4 on: 1f1b" in result.stdout
    assert "schedc check 1f1b" in page.read_text(encoding="utf-8")


def test_a_page_above_16_ranks_has_no_floors(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    assert schedc("compare", "1f1b", "zbv", "-D", "P=17", "-D", "M=4", "-o", str(page)).exit_code in (0, 1)
    text = page.read_text(encoding="utf-8")
    assert '"floors": []' in text or '"floors":[]' in text
    assert "schedc check 1f1b -D P=17" in text


def test_an_own_schedule_takes_its_ranks_by_role(tmp_path: Path) -> None:
    path = tmp_path / "my own.sched"
    text = load("1f1b").text.replace("P: ranks", "N: ranks").replace("M: microbatches", "K: microbatches")
    path.write_text(re.sub(r"\bP\b", "N", re.sub(r"\bM\b", "K", text)), encoding="utf-8")
    mine, library = facts_of("compare", str(path), "1f1b", "-D", "P=3", "-D", "M=5")["schedules"]
    assert mine["makespan"] == library["makespan"]
    assert facts_of(*shlex.split(mine["command"])[1:])["makespan"] == mine["makespan"]
    piped = CliRunner().invoke(main, ["compare", "-", "-D", "P=3", "-D", "M=5", "--json"], input=path.read_text())
    assert json.loads(piped.stdout)["schedules"][0]["makespan"] == mine["makespan"]
    refused = CliRunner().invoke(main, ["compare", "-", "-o", "page.html"], input=path.read_text())
    assert (refused.exit_code, "save what comes through the pipe" in refused.output) == (2, True)


def test_memory_has_the_unit_of_its_cost_where_that_is_given() -> None:
    lines = schedc("compare", "zbv", "-D", "P=2", "-D", "M=4", "--cost", "activation=3", "--memory", "5").stdout
    assert "activation = 3; memory in the unit of `activation`\n" in lines
    assert ">: holds more than the 5 of --memory\n" in lines
    assert "shortest from memory 6 on: zbv\n" in lines


def test_a_size_that_is_named_as_another_one_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.sched", tmp_path / "other.sched"
    path.write_text(re.sub(r"\bP\b", "N", load("1f1b").text), encoding="utf-8")
    other.write_text(path.read_text(encoding="utf-8").replace("(N:", "(P: count = 2, N:"), encoding="utf-8")
    assert "no schedule has a size `N`" in schedc("compare", str(path), "-D", "N=4").output
    result = schedc("compare", str(path), str(other), "-D", "P=2", "-D", "M=2")
    assert result.exit_code == 1
    assert "its size `P` is not the ranks that -D P gives" in result.stdout


def test_steps_without_work_have_no_bubble() -> None:
    rows = facts_of("compare", "zbv", "-D", "P=2", "-D", "M=4", *(f"--cost={key}=0" for key in "FIW"))["schedules"]
    assert [(row["makespan"], row["bubble_ratio"]) for row in rows] == [(0, 0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1b", "-D", "w=2"), "no schedule has a size `w`"),
        (("1f1b", "--cost", "F=1,2"), "a comparison is of one F"),
        (("1f1b", "-D", "P=65", "-o", "page.html"), "a page has room where P is from 2 to 64"),
        (("1f1b", "-o", "page.svg"), "page.svg: the output is a page, FILE.html"),
        (("1f1b", "--memory", "0"), "0"),
        (("1f1b", "--memory", "nan"), "'nan' is no number above 0"),
        ((), "SCHEDULE"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = schedc("compare", *arguments)
    assert result.exit_code == 2
    assert said in result.output
