"""The playground answers with what commands print: in this process, and as a built page in a browser, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playground.answers import MOST_OPS, command

from schedc.load.library import load, names
from support.chromium import Browser
from support.needs import PLAYGROUND, needs
from support.playground_page import DRAWN, asked, foreign, request_of, unequal
from support.served import served

FIGURES, FINDINGS = (f"document.getElementById('{name}').textContent" for name in ("figures", "findings"))
LIMIT = """
const wait = setTimeout;
let limit = 10_000, ended = 0;
window.setTimeout = (act, time, ...more) =>
  time === 10_000 ? wait(() => { ended += 1; act(); }, limit) : wait(act, time, ...more);
"""
"""Makes the limit of ten seconds a variable of the page, and counts the runs that it ended."""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_text_is_checked_and_drawn_at_sizes_and_costs(room: Path) -> None:
    text = load("zbv").text
    drawn = asked("draw", text, sizes={"P": "3", "M": ""}, costs={"p2p": "0.5"})
    options = ("mine.sched", "-D", "P=3", "--cost", "p2p=0.5")
    assert drawn["facts"] == json.loads(command("check", *options, "--json").out)
    assert drawn["svg"] == command("show", *options, "--format", "svg").out
    assert drawn["facts"]["sizes"]["P"] == 3
    assert (drawn["schedules"], set(drawn["sizes"]), drawn["error"]) == (["zbv"], {"P", "M"}, "")


def test_findings_have_places_and_wrong_sizes_a_reason(room: Path) -> None:
    broken = asked("draw", load("zbv").text.replace("place v", "plaice v"))
    (finding,) = broken["facts"]["diagnostics"]
    assert finding["code"] == "S001"
    assert finding["line"] > 1
    assert broken["svg"] == ""
    few = asked("draw", load("zbv").text, sizes={"P": "0"})
    assert "P" in json.dumps(few["facts"]["diagnostics"] if few["facts"] else few["error"])
    letters = asked("draw", load("zbv").text, sizes={"P": "four"})
    assert "four" in letters["error"]
    assert letters["facts"] is None
    assert "four" in asked("compare", load("zbv").text, sizes={"P": "four"})["error"]


def test_more_ops_than_a_tab_takes_are_refused_before_they_are_made(room: Path) -> None:
    large = asked("draw", load("1f1b").text, sizes={"P": "1000", "M": "1000000"})
    assert (large["facts"], large["svg"]) == (None, "")
    assert f"{MOST_OPS:,}" in large["error"]
    assert "2,000,000,000" in large["error"]


def test_one_of_several_schedules_is_chosen(room: Path) -> None:
    two = load("gpipe").text + load("1f1b").text.replace("sched 1", "")
    drawn = asked("draw", two, schedule="1f1b")
    assert drawn["schedules"] == ["gpipe", "1f1b"]
    assert drawn["facts"]["schedule"] == "1f1b"


def test_orders_of_torch_come_in_and_go_out(room: Path) -> None:
    order = asked("export", load("zbv").text, to="csv", sizes={"P": "2", "M": "4"})["text"]
    again = asked("draw", order, form="csv")
    assert (
        again["facts"]["makespan"] == asked("draw", load("zbv").text, sizes={"P": "2", "M": "4"})["facts"]["makespan"]
    )
    assert again["svg"].startswith("<svg")
    assert "S607" in asked("export", load("zbv").text, to="megatron")["error"]


def test_texts_are_completed_coloured_and_formatted(room: Path) -> None:
    text = load("1f1b").text
    line = next(at for at, each in enumerate(text.split("\n"), 1) if "place" in each)
    words = asked("complete", text, line=line, column=len("  place ") + 1)["words"]
    assert {"linear", "v"} <= {each["word"] for each in words}
    kinds = {kind for *_, kind in asked("colour", text)["tokens"]}
    assert {"enumMember", "parameter"} <= kinds
    assert asked("format", text.replace("  place", "      place"))["text"] == text
    assert "layout" in asked("layout", text, layout="Et|t|t")["text"]


def test_the_library_is_compared_with_the_text(room: Path) -> None:
    facts = asked("compare", load("dualpipev").text, sizes={"P": "2", "M": ""})["facts"]
    assert [row["schedule"] for row in facts["schedules"]] == ["mine.sched", *names()]
    assert (facts["ranks"], facts["microbatches"]) == (2, 10), "10 is the default of the text"


def test_the_library_is_compared_with_an_order_at_its_own_sizes(room: Path) -> None:
    order = command("export", "zbv", "-D", "P=2", "-D", "M=4", "--to", "csv").out
    facts = asked("compare", order, form="csv")["facts"]
    assert (facts["ranks"], facts["microbatches"]) == (2, 4)
    assert facts["schedules"][0]["schedule"] == "mine.csv"


@pytest.mark.slow
@needs("chromium", "playground")
def test_the_page_gives_the_native_bytes_asks_no_other_host_and_works_offline(room: Path) -> None:
    with Browser(room / "profile") as browser:
        with served(PLAYGROUND) as address:
            browser.visit(address, DRAWN)
            assert unequal(browser) == []
            assert browser.now("document.querySelector('#drawing svg') !== null")
            assert "bubble" in browser.now(FIGURES)
            browser.result("navigator.serviceWorker.ready.then(() => 1)")
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=LIMIT)
        browser.visit(address, DRAWN)  # the server is gone
        assert "bubble" in browser.now(FIGURES)
        export = json.dumps(request_of("export", "", name="zbv", to="csv"))
        assert "F0" in browser.result(f"playground.ask({export})")["text"], "modules that no drawing needs"
        assert browser.now(f"limit = 500; {typed_size('P', 64)}; {typed_size('M', 1500)}; ended") == 0
        browser.wait_for(f"{FINDINGS}.includes('interrupted after ten seconds')")
        assert browser.now(f"[ended, {FIGURES}]") == [1, ""]
        browser.now(f"limit = 10_000; {typed_size('P', '')}; {typed_size('M', '')}")
        browser.wait_for(f"{FIGURES}.includes('bubble') && {FINDINGS} === ''")
        assert foreign(browser, address) == []


def typed_size(name: str, size: int | str) -> str:
    """The script that writes a size into its field."""
    field = f"document.querySelector('#sizes input[name={name}]')"
    return f"{field}.value = '{size}'; {field}.dispatchEvent(new Event('input')); 0"
