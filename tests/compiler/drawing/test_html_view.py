"""The contents of a page in a browser: colours, tables, several schedules, hostile names, and large schedules."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from schedc.drawing import palette
from schedc.ir.ops import OpKind
from schedc.step.costs.costs import Costs
from support.charts import library_chart
from support.chromium import Browser
from support.html_page import PAYLOADS, PageView, hostile


@pytest.mark.slow
def test_cells_have_the_colours_of_the_palette_and_one_microbatch_stands_out(browser: Browser, tmp_path: Path) -> None:
    chart = library_chart("zbv", P=4, M=8)
    view = PageView(browser, tmp_path, chart)
    cells, schedule = chart.cells, chart.schedule
    rows = cells.first
    fills = [
        palette.FILLS[OpKind(kind)][palette.shade_of(chunk)]
        for kind, chunk in zip(schedule.kind[rows].tolist(), cells.chunk[rows].tolist(), strict=True)
    ]
    middles = list(zip(((cells.start + cells.end) / 2).tolist(), cells.rank.tolist(), strict=True))
    assert view.colours(middles) == fills
    browser.value("microbatch.focus()")
    browser.key("3")
    assert view.state("microbatch") == "3"
    bright = [painted == fill for painted, fill in zip(view.colours(middles), fills, strict=True)]
    assert bright == (schedule.microbatch[rows] == 3).tolist()
    view.finish()


@pytest.mark.slow
def test_the_table_sums_the_classes(browser: Browser, tmp_path: Path) -> None:
    chart = library_chart("1f1b", Costs(F=(1, 1, 2, 1), B=(2, 2, 4, 2), p2p=0.25), P=4, M=12)
    PageView(browser, tmp_path, chart).finish()
    rows = browser.value("[...document.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    heads = browser.value("[...document.querySelectorAll('thead th')].map(c => c.textContent)")
    assert heads[2:8] == ["bubble", "warm-up", "cooldown", "dependency", "message", "imbalance"]
    assert len(rows) == 4
    for rank, row in enumerate(rows):
        bubble, *classes = map(float, row[2:8])
        assert sum(classes) == pytest.approx(bubble)
        assert bubble == pytest.approx(chart.timeline.bubble[rank])


@pytest.mark.slow
def test_two_schedules_share_the_axis_and_dark_is_dark(browser: Browser, tmp_path: Path) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    view = PageView(browser, tmp_path, library_chart("1f1b", P=4, M=8), library_chart("gpipe", P=4, M=8))
    assert view.hover(0.5, 0)[0] == view.hover(0.5, 0, 1)[0] == "0F0 on rank 0"
    assert view.hover(9.0, 0)[0] == "idle on rank 0: dependency"
    assert view.hover(9.0, 0, 1)[0] == "idle on rank 0: dependency"
    assert view.colours([(0.5, 0)], 1) == [palette.FILLS[OpKind.F][0]]
    ground, ink = browser.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    colours = ["#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", text)) for text in (ground, ink)]
    assert palette.luminance(colours[0]) < 0.02
    assert palette.contrast(*colours) > 12
    browser.call("Emulation.setEmulatedMedia", features=[])
    view.finish()


@pytest.mark.slow
def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    for payload in PAYLOADS:
        view = PageView(browser, tmp_path, hostile(payload))
        assert browser.value("typeof window.hacked") == "undefined"
        assert payload[:8].strip() in str(browser.value("document.querySelector('h1').textContent"))
        assert browser.value("document.querySelectorAll('h1 *, p *:not(kbd), img, svg').length") == 0
        view.finish()


@pytest.mark.slow
def test_a_hundred_thousand_cells(browser: Browser, tmp_path: Path) -> None:
    chart = library_chart("zbv", P=32, M=640)
    assert len(chart.cells) > 100_000
    view = PageView(browser, tmp_path, chart)
    assert (tmp_path / "page.html").stat().st_size < 150_000
    assert browser.value("document.querySelectorAll('*').length") < 1000
    for _ in range(9):
        browser.mouse("Wheel", *view.at(1000.5, 3), deltaX=0, deltaY=-500)
    rank = chart.cells.of_rank(3)
    cell = rank.start + int(np.searchsorted(chart.cells.start[rank], 1000.5, side="right")) - 1
    row = int(chart.cells.first[cell])
    assert view.hover(1000.5, 3)[0] == chart.schedule.describe(row).replace("(", "on ").rstrip(")")
    view.finish()
