"""The page of the frontier: loads nothing, prices its orders as the command does, also where sliders move."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedc.cli import main
from support.chromium import Browser
from support.html_page import PageReader

SIZES = ("-D", "P=4", "-D", "M=16")
COSTS = {"F": 1.5, "I": 1.25, "W": 0.75, "p2p": 0.05}


def facts_and_page(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(main, ["frontier", *SIZES, *arguments, "--json", "-o", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), path.read_text(encoding="utf-8")


def rows(browser: Browser) -> list[tuple[str, str]]:
    """The command and the bubble of each row."""
    read = "[...document.querySelectorAll('#points tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    return sorted((cells[5], cells[4]) for cells in browser.value(read))


def expected(facts: dict[str, Any], without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    points = [each for each in facts["points"] if each["schedule"] not in without]
    return sorted((each["command"], f"{each['bubble']:.4g}") for each in points)


@pytest.mark.slow
def test_the_page_may_load_nothing_and_is_small(tmp_path: Path) -> None:
    _, page = facts_and_page(tmp_path / "page.html")
    read = PageReader(page)
    (policy,) = [dict(attributes)["content"] for _, attributes in read.elements if "http-equiv" in dict(attributes)]
    assert re.fullmatch(r"default-src 'none'; script-src 'sha256-\S+'; style-src 'sha256-\S+'; base-uri 'none'", policy)
    assert not re.search(
        r"https?://(?!www.w3.org/2000/svg)|//#|@import|url\(|innerHTML|eval\(", read.script + read.style
    )
    assert len(page) < 1_000_000


@pytest.mark.slow
def test_sliders_price_the_orders_as_the_command_does(browser: Browser, tmp_path: Path) -> None:
    path, faults = tmp_path / "page.html", len(browser.faults)
    facts, _ = facts_and_page(path)
    browser.open(path, ready="document.querySelectorAll('#points tbody tr.chosen').length === 1")
    assert rows(browser) == expected(facts)
    assert browser.value("document.querySelectorAll('.floor').length") == 3
    proved = "document.getElementById('points').textContent.split('proved the least').length - 1"
    assert browser.value(proved) == sum(point["proven"] for point in facts["points"]) > 0  # of kept orders
    for key, value in COSTS.items():
        slider = f"document.getElementById('slider-{key}')"
        browser.value(f"({slider}.value = {value}, {slider}.dispatchEvent(new Event('input')), 0)")
    other, _ = facts_and_page(path, *(part for key, value in COSTS.items() for part in ("--cost", f"{key}={value}")))
    by_costs = ("adaptive_pipe", "zb_auto", "zb_greedy")
    moved = [(command, bubble) for command, bubble in rows(browser) if command.split()[2] not in by_costs]
    assert moved == expected(other, by_costs)
    assert browser.value("document.querySelectorAll('.floor').length") == 0
    assert browser.value(proved) == 0  # the floors of the new costs are unknown to the page
    assert "are hidden" in browser.value("document.getElementById('floors-said').textContent")
    assert len(browser.faults) == faults
