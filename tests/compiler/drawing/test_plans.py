"""The plot of plans, and their page: what is in them, safe with any names, and what mouse and keys do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from schedc.drawing.html_plans import draw_plans
from schedc.drawing.palette import DARK, LIGHT
from schedc.drawing.pareto import ParetoPlot, PlanPoint, draw_pareto
from schedc.report.plan_pictures import pareto_plot, plans_page
from schedc.report.plans import certificate_text
from support.chromium import Browser
from support.html_page import PAYLOADS, PageReader
from support.plan_facts import plan_facts, search_facts, slider_facts

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="40" height="20"/></svg>'
SPACE = "{http://www.w3.org/2000/svg}"


def hostile(payload: str) -> dict[str, Any]:
    facts = search_facts(plan_facts(1, schedule=payload), plan_facts(2))
    facts["sliders"] = slider_facts(payload, "02.sched")
    facts["sliders"]["settings"][0] |= {"name": payload, "says": payload, "unit": payload}
    facts["model"]["name"] = facts["cluster"]["name"] = payload
    facts["plans"][0]["file"] = payload
    return facts | {"left_out": [{"schedule": payload, "reason": payload}]}


def page(facts: dict[str, Any], beside: int = -1) -> str:
    return draw_plans(plans_page(facts, {plan["file"]: SVG for plan in facts["plans"]}, beside))


def test_the_plot_has_every_plan_and_both_limits() -> None:
    plot = draw_pareto(pareto_plot(search_facts()))
    assert plot == draw_pareto(pareto_plot(search_facts()))
    tree = ElementTree.fromstring(plot)
    plans = [circle for circle in tree.iter(f"{SPACE}circle") if circle.get("class") == "plan" and len(circle)]
    places = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in plans]
    assert places == sorted(places, key=lambda place: -place[0]) == sorted(places, key=lambda place: -place[1])
    words = [text.text for text in tree.iter(f"{SPACE}text")]
    assert "bound: 18.00 s" in words
    sentence = "at the medians no plan of this space is faster than 18.00 s; the 3rd takes 18.20 s"
    assert sentence in " ".join(map(str, words))
    assert "a device has 60.0 GB" in words
    assert {"1", "2", "3"} <= set(words)
    assert "18.00 s, 49.0 GB, tp 8, cp 1" in str(plans[0][0].text)
    limits = [line for line in tree.iter(f"{SPACE}line") if line.get("class") == "limit"]
    assert len(limits) == 2
    assert float(limits[0].attrib["y1"]) == pytest.approx(places[0][1], abs=0.02)
    assert DARK.paper in plot
    assert LIGHT.paper in plot


def test_steps_far_apart_stand_on_a_logarithmic_axis() -> None:
    steps = (2.0, 4.0, 8.0, 64.0)
    points = tuple(PlanPoint(step, (10 - at) * 1e9, "") for at, step in enumerate(steps))
    tree = ElementTree.fromstring(draw_pareto(ParetoPlot("far", ("four plans",), (), points)))
    down = sorted(float(each.attrib["cy"]) for each in tree.iter(f"{SPACE}circle") if each.get("class") == "on-front")
    down = down[-4:]
    assert down[3] - down[2] == pytest.approx(down[2] - down[1], abs=0.02)
    assert down[1] - down[0] == pytest.approx(3 * (down[2] - down[1]), abs=0.05)
    words = [text.text for text in tree.iter(f"{SPACE}text")]
    assert {"2", "5", "10", "20", "50"} <= set(words)


def test_names_of_points_stand_apart() -> None:
    plans = [plan_facts(1) for _ in range(10)]
    for number, plan in enumerate(plans):
        plan["step_s"] += 0.001 * number
    tree = ElementTree.fromstring(draw_pareto(pareto_plot(search_facts(*plans))))
    names = [text for text in tree.iter(f"{SPACE}text") if text.get("class") == "point"]
    assert 1 <= len(names) < 10
    corners = [(float(name.attrib["x"]), float(name.attrib["y"])) for name in names]
    assert all(abs(a[0] - b[0]) > 7 or abs(a[1] - b[1]) > 10 for a in corners for b in corners if a is not b)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_cannot_become_markup(payload: str) -> None:
    read, plain = PageReader(page(hostile(payload))), PageReader(page(hostile("x")))
    assert (read.elements, read.comments) == (plain.elements, [])
    assert read.page_data["facts"]["model"]["name"] == payload
    shown, expected = (ElementTree.fromstring(draw_pareto(pareto_plot(hostile(name)))) for name in (payload, "x"))
    assert [each.tag for each in shown.iter()] == [each.tag for each in expected.iter()]


def test_the_page_may_load_nothing() -> None:
    read = PageReader(page(search_facts()))
    (policy,) = [dict(attributes)["content"] for tag, attributes in read.elements if "http-equiv" in dict(attributes)]
    assert re.fullmatch(
        r"default-src 'none'; img-src data:; script-src 'sha256-\S+'; style-src 'sha256-\S+'; base-uri 'none'", policy
    )
    texts = (read.script + read.style).replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|//#|@import|url\(|innerHTML|eval\(", texts)


def shown(browser: Browser, path: Path, facts: dict[str, Any], fragment: str = "", beside: int = -1) -> None:
    path = path / "index.html"
    path.write_text(page(facts, beside), encoding="utf-8")
    browser.open(path, fragment, ready="document.body?.dataset.ready === 'yes'")


def chosen(browser: Browser) -> list[int]:
    return [int(each) for each in browser.value("[document.body.dataset.chosen, document.body.dataset.beside]")]


def middle(browser: Browser, element: str) -> tuple[float, float]:
    x, y = browser.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())")
    return float(x), float(y)


def bars(browser: Browser, name: str) -> list[list[str]]:
    """Rows of name, value and difference."""
    texts = browser.value(f"[...document.getElementById('{name}').children].map(each => each.textContent)")
    return [[row[0], row[2], row[3]] for row in zip(*[iter(texts)] * 4, strict=True)]


@pytest.mark.slow
def test_mouse_and_keys_choose_plans(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, search_facts())
    assert chosen(browser) == [0, -1]
    assert bars(browser, "waterfall")[0] == ["ideal", "7.100 s", ""]
    assert bars(browser, "waterfall")[-1] == ["sum", "18.00 s", ""]
    assert bars(browser, "memory")[-1] == ["sum", "49.00 GB", ""]
    browser.key("ArrowDown")
    browser.key("b")
    assert chosen(browser) == [1, 0]
    assert [row for row in bars(browser, "waterfall") if row[2]] == [
        ["bubbles", "1.300 s", "+0.1000"], ["sum", "18.10 s", "+0.1000"],
    ]  # fmt: skip
    assert browser.value("document.getElementById('difference').textContent").startswith("0.1000 s slower (0.6 %)")
    x, y = middle(browser, "document.querySelectorAll('circle.plan')[2]")
    browser.mouse("Moved", x, y)
    tip = browser.value("[...document.getElementById('tip').children].map(line => line.textContent)")
    assert tip[0] == "3: 03.sched"
    assert "schedule 1f1b" in tip
    browser.click(x, y)
    assert chosen(browser) == [2, 0]
    assert "plan=3&beside=1" in browser.value("location.hash")
    browser.key("Escape")
    assert chosen(browser) == [2, -1]
    assert browser.value("document.getElementById('picture').alt") == "Timeline of 03.sched"
    assert browser.value("document.getElementById('picture').naturalWidth") == 40
    assert browser.faults == []


@pytest.mark.slow
def test_the_table_sorts_by_any_column(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, search_facts(), "#plan=2&beside=3")
    assert chosen(browser) == [1, 2]
    files = "[...document.querySelectorAll('#plans tbody tr')].map(row => row.lastElementChild.textContent)"
    click = "[...document.querySelectorAll('#plans th button')].find(each => each.textContent === '{}').click()"
    browser.now(click.format("GB"))
    assert browser.value(files) == ["03.sched", "02.sched", "01.sched"]
    browser.key("ArrowDown")
    assert chosen(browser)[0] == 0
    browser.now(click.format("GB"))
    assert browser.value(files) == ["01.sched", "02.sched", "03.sched"]
    browser.now(click.format("schedule"))
    assert browser.value(files) == ["03.sched", "01.sched", "02.sched"]
    assert browser.value("document.querySelectorAll('th[aria-sort]').length") == 1
    assert browser.faults == []


def with_sliders() -> dict[str, Any]:
    return search_facts() | {"sliders": slider_facts("01.sched", "02.sched", "03.sched")}


def ranking(browser: Browser) -> list[list[str]]:
    """Names and steps of the plans at the value of the slider."""
    rows = "[...document.querySelectorAll('#ranking li')].map(row => [1, 2].map(at => row.children[at].textContent))"
    return [list(row) for row in browser.value(rows)]


def texts(browser: Browser, selector: str) -> str:
    return " ".join(browser.value(f"[...document.querySelectorAll('{selector}')].map(each => each.textContent)"))


@pytest.mark.slow
def test_sliders_reorder_plans(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, with_sliders(), "#vary=grouped&at=0.155563")
    assert ranking(browser) == [["02.sched", "18.20 s"], ["01.sched", "18.30 s"], ["03.sched", "18.35 s"]]
    assert texts(browser, "#moved-said") == "02.sched is the fastest of these plans at 0.1556 of peak (−1.5 widths)"
    assert "interpolated" in texts(browser, "#moved-note")
    browser.now("document.getElementById('setting0').dispatchEvent(new Event('dblclick'))")
    assert ranking(browser)[0] == ["01.sched", "18.00 s"]
    browser.now("document.getElementById('setting1').focus()")
    for _ in range(60):
        browser.key("ArrowLeft")
    assert texts(browser, "#setting-head") == "rail.Bps: bytes per second"
    assert texts(browser, ".setting.moved .value, .setting.moved .far") == "25 GB/s × 0.5"
    assert ranking(browser)[0] == ["01.sched", "18.20 s"]
    assert "rail.Bps, GB/s" in texts(browser, "#moved-plot text")
    assert "vary=rail.Bps&at=25000000000" in browser.value("location.hash")
    assert chosen(browser) == [0, -1], "keys of a slider choose no plan"
    browser.value("(location.hash = 'vary=device.usable&at=0.68')")
    assert ranking(browser) == [["03.sched", "18.35 s"], ["01.sched", "does not fit"], ["02.sched", "does not fit"]]
    assert texts(browser, "#no-effect") == "Without effect on these plans: cp."
    assert browser.faults == []


@pytest.mark.slow
def test_plots_have_units_legends_and_zoom(browser: Browser, tmp_path: Path) -> None:
    facts = with_sliders()
    shown(browser, tmp_path, facts)
    for plot, units in (
        ("plot", ("memory of the fullest rank, GB", "step time, s")),
        ("moved-plot", ("grouped, of peak", "longer than 01.sched, %")),
    ):
        words = texts(browser, f"#{plot} text")
        assert all(unit in words for unit in units)
    legend = texts(browser, "#plot-legend span")
    assert all(word in legend for word in ("plan, with its number", "bound: 18.00 s", "memory of a device: 60.0 GB"))
    assert browser.value("document.body.innerText").count(certificate_text(facts)) == 1
    for width in (1400, 420):
        browser.resize(width, 1000)
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(OVERLAPS) == []
    browser.resize(1400, 1000)
    ticks = "[...document.querySelectorAll('#plot .tick')].map(each => each.textContent)"
    whole = browser.value(ticks)
    browser.key("+")
    closer = browser.value(ticks)
    assert closer != whole
    browser.key("0")
    assert browser.value(ticks) == whole
    x, y = middle(browser, "document.querySelector('#plot svg')")
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-300)
    assert browser.value(ticks) != whole
    browser.now("document.querySelector('#plot-zoom button:last-child').click()")
    assert browser.value(ticks) == whole
    close = [plan_facts(1) for _ in range(12)]
    for number, plan in enumerate(close):
        plan["step_s"] += 0.001 * number
    shown(browser, tmp_path, search_facts(*close))
    assert browser.value(OVERLAPS) == []
    assert 1 <= browser.value("document.querySelectorAll('.number').length") < 12
    assert browser.faults == []


OVERLAPS = """(() => {
  const texts = [...document.querySelectorAll('.plot text')];
  const boxes = texts.map((each) => [each.textContent, each.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.flatMap(([a, x], i) => boxes.slice(i + 1).filter(([, y]) => meet(x, y)).map(([b]) => [a, b]));
})()"""
"""Pairs of texts in plots that lie on each other."""


@pytest.mark.slow
def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    for payload in PAYLOADS:
        shown(browser, tmp_path, hostile(payload), beside=1)
        assert browser.value("typeof window.hacked") == "undefined"
        assert payload[:8].strip() in browser.value("document.querySelector('h1').textContent")
        assert (
            browser.value(
                "document.querySelectorAll('h1 *, td *, #remarks *:not(li), #setting-head *, .setting label *').length"
            )
            == 0
        )
        assert browser.faults == []


@pytest.mark.slow
def test_a_page_without_plans_says_so(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, search_facts() | {"plans": [], "pareto": []})
    text = browser.value("document.getElementById('certificate').textContent")
    assert text == "no plan of this space is legal and fits in memory"
    assert browser.faults == []
