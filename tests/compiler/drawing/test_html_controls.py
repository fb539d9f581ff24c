"""The controls of a page in a browser: zoom, keys, the address, and the way from a cell to its producer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from schedc.drawing import palette
from schedc.ir.ops import OpKind
from support.charts import library_chart
from support.chromium import Browser
from support.html_page import PageView


@pytest.mark.slow
def test_zoom_pan_and_keys(browser: Browser, tmp_path: Path) -> None:
    page = PageView(browser, tmp_path, library_chart("1f1b", P=4, M=8))
    x, y = page.at(13.5, 0)
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-500)
    assert page.number("to") - page.number("from") == pytest.approx(33 * np.exp(-0.8), rel=1e-6)
    assert page.at(13.5, 0)[0] == pytest.approx(x, abs=1), "the time under the pointer stays there"
    (at_the_edge,) = page.colours([(page.number("to") + 0.1, 3)])
    assert at_the_edge in {palette.FILLS[OpKind.F][0], palette.FILLS[OpKind.B][0]}
    before = page.number("from")
    browser.drag(x, y, -200)
    moved = page.number("from")
    assert moved > before
    assert page.state("cell") == "", "a drag chooses nothing"
    browser.click(x, y)
    chosen = page.state("cell")
    assert page.state("microbatch") == re.sub(r".*\D", "", chosen)
    browser.key("ArrowLeft")
    assert page.number("from") < moved
    browser.key("+")
    browser.key("-")
    browser.key("0")
    assert (page.number("from"), page.number("to")) == (0, 33)
    browser.key("-")
    assert (page.number("from"), page.number("to")) == (0, 33), "there is nothing beyond the step"
    browser.key("c")
    assert page.state("critical") == "true"
    browser.key("Escape")
    assert (page.state("cell"), page.state("microbatch")) == ("", "-1")
    page.finish()


@pytest.mark.slow
def test_a_narrow_window_scrolls_only_down(browser: Browser, tmp_path: Path) -> None:
    page = PageView(browser, tmp_path, library_chart("dualpipev", P=4, M=10), library_chart("zbv", P=4, M=10))
    try:
        for width in (420, 320):
            browser.resize(width, 900)
            assert browser.value("[document.documentElement.scrollWidth, canvas.clientWidth < innerWidth]") == [
                width,
                True,
            ]
    finally:
        browser.resize(1400, 1000)
    page.finish()


VIEW = ("from", "to", "scroll", "cell", "microbatch", "critical", "classes")


@pytest.mark.slow
def test_the_address_keeps_the_view(browser: Browser, tmp_path: Path) -> None:
    charts = [library_chart("1f1b", P=16, M=32), library_chart("dualpipev", P=16, M=32)]
    page = PageView(browser, tmp_path, *charts)
    first = [page.state(name) for name in VIEW]
    browser.mouse("Wheel", *page.at(40.0, 3), deltaX=0, deltaY=-500)
    browser.value("chart.scrollTop = 900")
    pair = int(np.flatnonzero(charts[1].cells.second >= 0)[40])
    place = float(charts[1].cells.start[pair]) + 0.5, int(charts[1].cells.rank[pair])
    browser.value("canvas.focus()")
    browser.key("0")
    browser.click(*page.at(*place, 1))
    browser.key("+")
    browser.key("c")
    browser.key("b")
    view = [page.state(name) for name in VIEW]
    assert "&" in page.state("cell")
    assert all(now != before for now, before in zip(view, first, strict=True) if now != "0")
    browser.wait_for("location.hash.includes('classes=0')")
    fragment = browser.now("location.hash")
    again = PageView(browser, tmp_path, *charts, fragment=fragment)
    shown = [again.state(name) for name in VIEW]
    assert shown[2:] == view[2:]
    assert [float(value) for value in shown[:2]] == pytest.approx([float(value) for value in view[:2]], rel=1e-7)
    assert browser.value("[critical.checked, classes.checked]") == [True, False]
    for wrong in ("", "from=9&to=2&cell=7:0F0&microbatch=-1&scroll=x", "cell=0:99F99&from=%zz&critical"):
        browser.value(f"location.hash = '{wrong}'")
        assert [again.state(name) for name in VIEW] == first
    browser.value("location.hash = 'cell=0:0F0'")
    assert (again.state("cell"), again.state("microbatch")) == ("0F0", "-1"), "a cell may be chosen and no microbatch"
    again.finish()


@pytest.mark.slow
def test_walking_from_cell_to_what_it_waited_for(browser: Browser, tmp_path: Path) -> None:
    page = PageView(browser, tmp_path, library_chart("1f1b", P=4, M=8))
    browser.click(*page.at(11.5, 0))
    assert page.state("cell") == "0B0"
    assert "waited 6 for 1B0 on rank 1" in str(browser.value("details.textContent"))
    trail = []
    for _ in range(5):
        browser.key("w")
        trail.append(page.state("cell"))
    assert trail == ["1B0", "2B0", "3B0", "3F0", "2F0"]
    browser.key("ArrowRight", shift=True)
    assert page.state("cell") == "2F1"
    browser.key("ArrowDown", shift=True)
    assert page.state("cell") == "3F0"
    page.finish()
