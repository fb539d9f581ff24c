"""The page of a diagnosis: safe with any names, loads nothing, and shows every cause with its share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.drawing.html_diagnosis import draw_diagnosis
from support.chromium import Browser
from support.html_page import PAYLOADS, PageReader
from support.paths import ROOT


def facts(name: str = "1f1b") -> dict[str, Any]:
    cause = {"cause": name, "what": name, "why": name, "gain": 0.25, "alone": 0.2, "interval": (0.2, 0.3)}
    answer = {"question": name, "gain": 0.5, "interval": None, "note": name}
    return {
        "schedule": name, "ranks": 4, "stages": 4, "microbatches": 8, "steps": 2, "measured_ms": 10.0, "residual": 0.0,
        "causes": [cause, {**cause, "gain": 0.1, "interval": None}], "ideal_ms": 5.0, "unexplained": 0.05,
        "bubble": {"warm-up": 0.1, "message": 0.0}, "what_if": [answer],
    }  # fmt: skip


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_of_a_trace_cannot_become_markup(payload: str) -> None:
    read, plain = PageReader(draw_diagnosis(facts(payload), payload)), PageReader(draw_diagnosis(facts("x"), "x"))
    assert (read.elements, read.comments) == (plain.elements, [])
    assert read.page_data["causes"][0]["what"] == payload


def test_the_page_of_a_diagnosis_may_load_nothing() -> None:
    read = PageReader(draw_diagnosis(facts()))
    (policy,) = [dict(attributes)["content"] for _, attributes in read.elements if "http-equiv" in dict(attributes)]
    assert re.fullmatch(r"default-src 'none'; script-src 'sha256-\S+'; style-src 'sha256-\S+'; base-uri 'none'", policy)
    assert not re.search(r"https?://|//#|@import|url\(|innerHTML|eval\(", read.script + read.style)


def test_the_page_shows_causes_in_order_with_bars_of_their_gains(browser: Browser, tmp_path: Path) -> None:
    path, faults = tmp_path / "page.html", len(browser.faults)
    questions = ["--what-if", "schedule=zbv", "--above", "100%"]
    trace = ROOT / "examples" / "traces" / "slow_rank"
    result = CliRunner().invoke(main, ["diagnose", str(trace), "--html", str(path), *questions])
    assert result.exit_code == 0, result.output
    browser.open(path, ready="document.querySelectorAll('#questions tbody tr').length === 1")
    rows = browser.value("[...document.querySelectorAll('#causes tbody tr')].map((r) => r.innerText)")
    gains = [float(row.split(" %")[0]) for row in rows]
    assert "rank 2" in rows[0]
    assert rows[-1].split("\t")[-2].strip() == "unexplained"
    widths = browser.value("[...document.querySelectorAll('#causes td.bar div')].map((d) => parseFloat(d.style.width))")
    assert widths == pytest.approx([100 * gain / gains[0] for gain in gains], abs=0.5)
    assert len(browser.faults) == faults


def test_a_replay_that_misses_is_told_in_place_of_causes(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(draw_diagnosis(facts(), "the times do not add up"), encoding="utf-8")
    browser.open(path, ready="document.querySelectorAll('#questions tbody tr').length === 1")
    assert browser.value("document.getElementById('none').innerText") == "the times do not add up"
    assert browser.value("document.querySelectorAll('#causes tr').length") == 0
