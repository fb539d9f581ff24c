"""The page: safe whatever names it is given, and in a real browser what it says, shows and does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedc.analysis.memory import measure_memory
from schedc.analysis.timeline import observed, simulate
from schedc.cost.costs import Costs
from schedc.draw import palette
from schedc.draw.chart import Chart
from schedc.draw.html_columns import in_steps
from schedc.draw.html_page import draw_html
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from support import chromium
from support.chromium import Browser
from support.random_schedules import random_schedule

PAYLOADS = (
    "</script><script>window.hacked=1</script>",
    "<!--<script>",
    '"><img src=x onerror="window.hacked=1">',
    "</title><svg onload=window.hacked=1>",
    "]]></style><style>*{display:none}",
    "{{script}} {{data}} \\u003c &lt;script&gt; \u2028\u2029\x00\x1b[31m\u202e'`${window.hacked=1}",
)


def chart_of(schedule: Schedule, costs: Costs | None = None) -> Chart:
    costs = costs or Costs()
    return Chart.of(schedule, simulate(schedule, costs), measure_memory(schedule, costs), costs)


def named(name: str, costs: Costs | None = None, **sizes: int) -> Chart:
    return chart_of(elaborate(open_schedule(name), sizes), costs)


class Reader(HTMLParser):
    """What a page consists of: its elements with their attributes, comments, the style, the data and the script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[Any, ...]]] = []
        self.comments: list[str] = []
        self._raw: dict[int, str] = {}
        self.feed(page)
        self.close()
        self.style, self.data, self.script = self._raw.values()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in {"style", "script"}:
            number = len(self.elements)
            self._raw[number] = self._raw.get(number, "") + data

    @property
    def page_data(self) -> Any:
        return json.loads(self.data)


def tables_of(data: Any) -> list[dict[str, dict[str, Any]]]:
    """Per chart of a page's data its tables, each a dict of columns: read back as the page reads them."""
    packed, at = zlib.decompress(base64.b64decode(data["packed"])), 0
    charts = []
    for chart in data["charts"]:
        tables: dict[str, dict[str, Any]] = {}
        for name, table in chart["tables"].items():
            columns = tables[name] = {}
            for column, head in table["columns"].items():
                values = np.full(table["count"], head["low"])
                for place in range(head["width"]):
                    values += np.frombuffer(packed, np.uint8, table["count"], at).astype(np.int64) << 8 * place
                    at += table["count"]
                values = np.cumsum(values) if head["running"] else values
                assert not head["whole"] or np.array_equal(values, values.astype(np.int32))
                columns[column] = values / 10.0 ** head["decimals"] if head["decimals"] else values
            if "wait" in columns:
                edges = np.cumsum(np.stack([columns["wait"], columns["length"]], 1).ravel())
                columns["start"], columns["end"] = edges.reshape(-1, 2).T / 10.0 ** chart["timeDecimals"]
        charts.append(tables)
    assert at == len(packed)
    return charts


def hostile(payload: str) -> Chart:
    schedule = random_schedule(7)
    return chart_of(replace(schedule, name=payload, doc=payload, sizes={payload: 1}, phases=(payload,)))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_cannot_become_markup(payload: str) -> None:
    plain = Reader(draw_html([hostile("x")]))
    page = draw_html([hostile(payload)])
    read = Reader(page)
    assert read.elements == plain.elements
    assert read.comments == []
    shown = read.page_data["charts"][0]
    assert shown["phases"][0].replace(" ", "").startswith(payload[:12].replace(" ", ""))
    assert not re.search("[\u2028\u2029\u202e\x00\x1b]", page)


def test_the_policy_names_what_the_page_holds_and_nothing_else() -> None:
    read = Reader(draw_html([named("1f1b")]))
    (policy,) = [dict(attributes)["content"] for tag, attributes in read.elements if "http-equiv" in dict(attributes)]
    script, style = (
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (read.script, read.style)
    )
    assert policy == f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'"
    refers = {"src", "href", "style", "action", "data", "srcset"}
    assert not [name for _, attributes in read.elements for name, _ in attributes if name in refers or name[:2] == "on"]
    assert not re.search(r"https?://|//#|@import|url\(|innerHTML|eval\(", read.script + read.style)


@pytest.mark.parametrize("costs", [Costs(), Costs(F=0.1, I=0.7, W=1 / 3, p2p=0.05), Costs(F=3e13, W=1e-3)])
def test_the_data_are_the_analyses(costs: Costs) -> None:
    for seed in range(8):
        chart = chart_of(random_schedule(seed), costs)
        page = draw_html([chart])
        assert page == draw_html([chart])
        read = Reader(page).page_data
        ((data,), (tables,)) = read["charts"], tables_of(read)
        known, cells, gaps = chart.timeline.dependencies, tables["cells"], tables["gaps"]
        close = 1e-11 * chart.timeline.makespan
        np.testing.assert_allclose(cells["start"], chart.timeline.start, rtol=0, atol=close)
        np.testing.assert_allclose(cells["end"], chart.timeline.end, rtol=0, atol=close)
        assert (cells["bound"] + np.arange(len(known))).tolist() == chart.timeline.bound_by.tolist()
        assert cells["stage"].tolist() == chart.schedule.stage[known.first].tolist()
        assert cells["microbatch"].tolist() == chart.schedule.microbatch[known.first].tolist()
        assert tables["path"]["cell"].tolist() == chart.critical.tolist()
        pairs = cells.get("microbatch2", np.full(len(known), -1))
        assert (pairs >= 0).tolist() == known.pairs.tolist()
        for name in ("rank", "cell"):
            assert gaps[name].tolist() == getattr(chart.bubbles, name).tolist()
        np.testing.assert_allclose(gaps["start"], chart.bubbles.start, rtol=0, atol=close)
        for part, expected in enumerate(chart.bubbles.parts):
            np.testing.assert_allclose(gaps.get(f"part{part}", 0.0), expected, rtol=0, atol=close)
        np.testing.assert_allclose(np.sum(data["totals"], axis=0), data["bubble"], atol=10 * close)
        held = cells["held"]
        peaks = [held[known.rank_start[r] : known.rank_start[r + 1]].max(initial=0) for r in range(data["ranks"])]
        assert peaks == data["peaks"]


@pytest.mark.parametrize(
    "values",
    [[], [0.0, 0.0], [0.1, 0.2, 0.1 + 0.2], [1 / 3, 1e-9, 2e5], [2.0**53 - 1, 1.0], [1e-280, 3e-281], [7e15, 0.5]],
)
def test_numbers_keep_twelve_digits_of_the_largest_in_as_few_steps_as_hold_them(values: list[float]) -> None:
    given = np.array(values)
    (steps,) = in_steps(given)
    np.testing.assert_allclose(
        steps.values / 10.0**steps.decimals, given, rtol=0, atol=5e-12 * np.abs(given).max(initial=0)
    )
    if given.size > 2 and given[0] == 0.1:
        assert (steps.values.tolist(), steps.decimals) == ([1, 2, 3], 1)


def test_names_of_phases_can_be_read_in_light_and_dark() -> None:
    style = Reader(draw_html([named("1f1b")])).style
    for part in (style.partition("@media")[0], style.partition("@media")[2]):
        paper, ink, strength = (
            re.findall(rf"--{name}: ([^;]+);", part)[0] for name in ("paper", "text", "phase-strength")
        )
        for tint in palette.PHASES:
            mixed = [
                round(int(tint[i : i + 2], 16) * float(strength) + int(paper[i : i + 2], 16) * (1 - float(strength)))
                for i in (1, 3, 5)
            ]
            assert palette.contrast(ink, "#" + "".join(f"{part:02x}" for part in mixed)) >= 4.5


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not chromium.PATH:
        pytest.skip("needs chromium, google-chrome or chromium-browser on the PATH")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


class Seen:
    """A page in the browser, with places of lanes and times on the screen."""

    def __init__(self, browser: Browser, path: Path, *charts: Chart, fragment: str = "") -> None:
        path = path / "page.html"
        path.write_text(draw_html(charts), encoding="utf-8")
        browser.open(path, fragment)
        self.browser = browser
        assert browser.urls == [path.as_uri()], "the page loads nothing but itself"

    def state(self, name: str) -> str:
        return str(self.browser.value(f"document.getElementById('canvas').dataset.{name}"))

    def number(self, name: str) -> float:
        return float(self.state(name))

    def at(self, time: float, rank: int, chart: int = 0) -> tuple[float, float]:
        """The point of the screen, in px, where a rank's cells are at a time."""
        return self.points([(time, rank)], chart)[0]

    def points(self, places: list[tuple[float, int]], chart: int = 0) -> list[tuple[float, float]]:
        box = self.browser.value("(({left, top, width}) => ({left, top, width}))(canvas.getBoundingClientRect())")
        state = self.browser.value("({...canvas.dataset})")
        gutter, low, high = (float(state[name]) for name in ("gutter", "from", "to"))
        scale = (box["width"] - gutter - float(state["right"])) / (high - low)
        first = box["top"] + float(state["tops"].split()[chart]) - float(state["scroll"]) + float(state["phases"]) + 8
        return [(box["left"] + gutter + (t - low) * scale, first + rank * float(state["pitch"])) for t, rank in places]

    def hover(self, time: float, rank: int, chart: int = 0) -> list[str]:
        """The lines of the tooltip there."""
        return self.tips([(time, rank)], chart)[0]

    def tips(self, places: list[tuple[float, int]], chart: int = 0) -> list[list[str]]:
        found = []
        for point in self.points(places, chart):
            self.browser.mouse("Moved", *point)
            found.append(self.browser.now("tip.hidden ? [] : [...tip.children].map(line => line.textContent)"))
        return found

    def colours(self, places: list[tuple[float, int]], chart: int = 0) -> list[str]:
        """What is painted above the numerals there."""
        left, top = self.browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())")
        points = [[x - left, y - top - 4] for x, y in self.points(places, chart)]
        read = "[...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
        pixels = self.browser.value(f"{points}.map(([x, y]) => {read})")
        return ["#" + "".join(f"{value:02x}" for value in pixel) for pixel in pixels]

    def finish(self) -> None:
        assert self.browser.faults == []


def test_hover_tells_the_op_its_cost_and_the_reason_of_the_wait(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("1f1b", P=4, M=8))
    assert seen.hover(11.5, 0) == [
        "0B0 on rank 0",
        "full backward of microbatch 0, stage 0 (chunk 0)",
        "phase steady",
        "10 to 12, cost 2",
        "waited 6 for 1B0 on rank 1 (dependency)",
        "activations held: at most 4, then 3",
    ]
    assert seen.hover(1.5, 0)[4] == "no wait: rank busy with 0F0 until 1"
    assert seen.hover(0.5, 0)[4] == "no wait: first on its rank, at time 0"
    assert seen.hover(3.5, 3)[4] == "waited 3 for 2F0 on rank 2 (warm-up)"
    assert seen.hover(8.0, 0) == ["idle on rank 0: dependency", "4 to 10, 6 long", "0B0 waited 6 for 1B0 on rank 1"]
    assert seen.hover(32.0, 3) == ["idle on rank 3: cooldown", "27 to 33, 6 long", "nothing left to do"]
    seen.finish()


def test_waits_for_messages_and_pairs_are_named(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("1f1b", Costs(p2p=0.5), P=2, M=2), named("dualpipev", P=4, M=10))
    assert seen.hover(6.0, 0)[4] == ("waited 3 for 1B0 on rank 1, whose message took 0.5 (dependency 2, message 1)")
    pair = seen.hover(24.0, 0, 1)
    assert pair[0] == "7F4 & 0B0 on rank 0 (overlapped pair)"
    assert pair[1:3] == [
        "forward of microbatch 4, stage 7 (chunk 1)",
        "full backward of microbatch 0, stage 0 (chunk 0)",
    ]
    assert pair[5] == "waited 3 for 6F4 & 1B0 on rank 1 (dependency)"
    seen.finish()


def test_the_reason_of_every_wait(browser: Browser, tmp_path: Path) -> None:
    """Against a statement of its own: what the cell needs, from whom, and when each of these is there."""
    for seed in (3, 11, 40):
        schedule = random_schedule(seed)
        costs = Costs(F=tuple(1.0 + s for s in range(schedule.stages)), B=2.5, I=1.5, W=1.0, p2p=0.5)
        chart = chart_of(schedule, costs)
        seen = Seen(browser, tmp_path, chart)
        known, end = chart.timeline.dependencies, chart.timeline.end
        made = {
            (int(schedule.stage[row]), OpKind(int(schedule.kind[row])) is OpKind.F, int(schedule.microbatch[row])): row
            for row in np.flatnonzero(schedule.kind != OpKind.W).tolist()
        }
        middles = ((chart.timeline.start + end) / 2).tolist()
        tips = seen.tips(list(zip(middles, known.rank.tolist(), strict=True)))
        for cell, tip in enumerate(tips):
            rank, start = int(known.rank[cell]), float(chart.timeline.start[cell])
            free = float(end[cell - 1]) if cell > known.rank_start[rank] else 0.0
            line = next(line for line in tip if line.startswith(("waited", "no wait")))
            if start == free:
                assert line.startswith("no wait: ")
                continue
            ready = {}
            for row in (int(known.first[cell]), int(known.second[cell])):
                is_forward = schedule.kind[row] == OpKind.F
                key = (int(schedule.stage[row]) + (-1 if is_forward else 1), is_forward, int(schedule.microbatch[row]))
                if row >= 0 and schedule.kind[row] != OpKind.W and key in made:
                    producer = made[key]
                    ready[producer] = end[known.cell_of[producer]] + 0.5 * (schedule.rank[producer] != rank)
            producer = max(ready, key=lambda row: ready[row])
            assert ready[producer] == start
            name, on = schedule.describe(producer).rstrip(")").split(" (")
            assert re.match(
                rf"waited {start - free:g} for (\S+ & )?{name}( & \S+)? on {on}, whose message took 0.5", line
            )
        seen.finish()


def test_zoom_pan_and_keys(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("1f1b", P=4, M=8))
    x, y = seen.at(13.5, 0)
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-500)
    assert seen.number("to") - seen.number("from") == pytest.approx(33 * np.exp(-0.8), rel=1e-6)
    assert seen.at(13.5, 0)[0] == pytest.approx(x, abs=1), "the time under the pointer stays there"
    (at_the_edge,) = seen.colours([(seen.number("to") + 0.1, 3)])
    assert at_the_edge in {palette.FILLS[OpKind.F][0], palette.FILLS[OpKind.B][0]}
    before = seen.number("from")
    browser.drag(x, y, -200)
    moved = seen.number("from")
    assert moved > before
    assert seen.state("cell") == "", "a drag chooses nothing"
    browser.click(x, y)
    chosen = seen.state("cell")
    assert seen.state("microbatch") == re.sub(r".*\D", "", chosen)
    browser.key("ArrowLeft")
    assert seen.number("from") < moved
    browser.key("+")
    browser.key("-")
    browser.key("0")
    assert (seen.number("from"), seen.number("to")) == (0, 33)
    browser.key("-")
    assert (seen.number("from"), seen.number("to")) == (0, 33), "there is nothing beyond the step"
    browser.key("c")
    assert seen.state("critical") == "true"
    browser.key("Escape")
    assert (seen.state("cell"), seen.state("microbatch")) == ("", "-1")
    seen.finish()


def test_keys_hide_the_tooltip_until_the_pointer_moves(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("1f1b", P=4, M=8))
    x, y = seen.at(11.5, 0)
    for key, time in (("c", 11.2), ("+", 11.4), ("ArrowLeft", 11.6), ("Escape", 11.8)):
        assert seen.hover(time, 0) != []
        browser.value("canvas.focus()")
        browser.key(key)
        assert browser.value("tip.hidden"), key
    browser.key("0")
    browser.mouse("Moved", *(still := seen.at(11.5, 0)))
    browser.key("+")
    browser.mouse("Moved", *still)  # as browsers do when a page moves under a pointer at rest
    assert browser.value("tip.hidden")
    browser.mouse("Moved", x + 1, y)
    browser.mouse("Wheel", x + 1, y, deltaX=0, deltaY=-300)
    shown = browser.value("tip.textContent")
    browser.mouse("Wheel", x + 1, y, deltaX=0, deltaY=300)
    browser.mouse("Wheel", x + 1, y, deltaX=400, deltaY=0)
    assert browser.value("tip.textContent") != shown, "the tooltip tells what is under the pointer by now"
    seen.finish()


def test_phases_are_named_over_the_lanes(browser: Browser, tmp_path: Path) -> None:
    chart = named("dualpipev", P=4, M=10)
    seen = Seen(browser, tmp_path, chart)
    assert seen.number("phases") >= 12
    names, runs = chart.cells.phase_names, chart.cells.phase_runs(1)
    for number, start, end in runs:
        x, y = seen.at((start + end) / 2, 1)
        browser.mouse("Moved", x, y - 14)
        tip = browser.now("[...tip.children].map(line => line.textContent)")
        assert tip[0] == f"phase {names[number]} on rank 1"
        assert tip[1] == f"{start:g} to {end:g}, {end - start:g} long"
    start = next(start for number, start, _ in chart.cells.phase_runs(3) if names[number] == "steady")
    read = "Math.min(...canvas.getContext('2d').getImageData(x, y, 40, 8).data)"
    (left, top), box = (
        seen.at(start, 3),
        browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())"),
    )
    dark = browser.value(f"(([x, y]) => {read})([{left - box[0]}, {top - box[1] - 19}])")
    assert dark < 80, "letters on a tint, which is pale"
    seen.finish()


def test_a_narrow_window_scrolls_only_down(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("dualpipev", P=4, M=10), named("zbv", P=4, M=10))
    try:
        for width in (420, 320):
            browser.resize(width, 900)
            assert browser.value("[document.documentElement.scrollWidth, canvas.clientWidth < innerWidth]") == [
                width,
                True,
            ]
    finally:
        browser.resize(1400, 1000)
    seen.finish()


VIEW = ("from", "to", "scroll", "cell", "microbatch", "critical", "classes")


def test_the_address_keeps_the_view(browser: Browser, tmp_path: Path) -> None:
    charts = [named("1f1b", P=16, M=32), named("dualpipev", P=16, M=32)]
    seen = Seen(browser, tmp_path, *charts)
    first = [seen.state(name) for name in VIEW]
    browser.mouse("Wheel", *seen.at(40.0, 3), deltaX=0, deltaY=-500)
    browser.value("chart.scrollTop = 900")
    pair = int(np.flatnonzero(charts[1].cells.second >= 0)[40])
    place = float(charts[1].cells.start[pair]) + 0.5, int(charts[1].cells.rank[pair])
    browser.value("canvas.focus()")
    browser.key("0")
    browser.click(*seen.at(*place, 1))
    browser.key("+")
    browser.key("c")
    browser.key("b")
    view = [seen.state(name) for name in VIEW]
    assert "&" in seen.state("cell")
    assert all(now != before for now, before in zip(view, first, strict=True) if now != "0")
    browser.wait_for("location.hash.includes('classes=0')")
    fragment = browser.now("location.hash")
    again = Seen(browser, tmp_path, *charts, fragment=fragment)
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


def test_walking_from_cell_to_what_it_waited_for(browser: Browser, tmp_path: Path) -> None:
    seen = Seen(browser, tmp_path, named("1f1b", P=4, M=8))
    browser.click(*seen.at(11.5, 0))
    assert seen.state("cell") == "0B0"
    assert "waited 6 for 1B0 on rank 1" in str(browser.value("details.textContent"))
    trail = []
    for _ in range(5):
        browser.key("w")
        trail.append(seen.state("cell"))
    assert trail == ["1B0", "2B0", "3B0", "3F0", "2F0"]
    browser.key("ArrowRight", shift=True)
    assert seen.state("cell") == "2F1"
    browser.key("ArrowDown", shift=True)
    assert seen.state("cell") == "3F0"
    seen.finish()


def test_cells_have_the_colours_of_the_palette_and_one_microbatch_stands_out(browser: Browser, tmp_path: Path) -> None:
    chart = named("zbv", P=4, M=8)
    seen = Seen(browser, tmp_path, chart)
    cells, schedule = chart.cells, chart.schedule
    rows = cells.first
    fills = [
        palette.FILLS[OpKind(kind)][palette.shade_of(chunk)]
        for kind, chunk in zip(schedule.kind[rows].tolist(), cells.chunk[rows].tolist(), strict=True)
    ]
    middles = list(zip(((cells.start + cells.end) / 2).tolist(), cells.rank.tolist(), strict=True))
    assert seen.colours(middles) == fills
    browser.value("microbatch.focus()")
    browser.key("3")
    assert seen.state("microbatch") == "3"
    bright = [painted == fill for painted, fill in zip(seen.colours(middles), fills, strict=True)]
    assert bright == (schedule.microbatch[rows] == 3).tolist()
    seen.finish()


def test_the_table_sums_the_classes(browser: Browser, tmp_path: Path) -> None:
    chart = named("1f1b", Costs(F=(1, 1, 2, 1), B=(2, 2, 4, 2), p2p=0.25), P=4, M=12)
    Seen(browser, tmp_path, chart).finish()
    rows = browser.value("[...document.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    heads = browser.value("[...document.querySelectorAll('thead th')].map(c => c.textContent)")
    assert heads[2:8] == ["bubble", "warm-up", "cooldown", "dependency", "message", "imbalance"]
    assert len(rows) == 4
    for rank, row in enumerate(rows):
        bubble, *classes = map(float, row[2:8])
        assert sum(classes) == pytest.approx(bubble)
        assert bubble == pytest.approx(chart.timeline.bubble[rank])


def test_two_schedules_share_the_axis_and_dark_is_dark(browser: Browser, tmp_path: Path) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    seen = Seen(browser, tmp_path, named("1f1b", P=4, M=8), named("gpipe", P=4, M=8))
    assert seen.hover(0.5, 0)[0] == seen.hover(0.5, 0, 1)[0] == "0F0 on rank 0"
    assert seen.hover(9.0, 0)[0] == "idle on rank 0: dependency"
    assert seen.hover(9.0, 0, 1)[0] == "idle on rank 0: dependency"
    assert seen.colours([(0.5, 0)], 1) == [palette.FILLS[OpKind.F][0]]
    ground, ink = browser.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    colours = ["#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", text)) for text in (ground, ink)]
    assert palette.luminance(colours[0]) < 0.02
    assert palette.contrast(*colours) > 12
    browser.call("Emulation.setEmulatedMedia", features=[])
    seen.finish()


def test_a_run_stands_above_its_prediction(browser: Browser, tmp_path: Path) -> None:
    predicted = named("1f1b", P=2, M=3)
    slow = simulate(predicted.schedule, Costs(F=2.0, B=4.5, p2p=0.25))
    run = Chart.of_run(predicted.schedule, observed(slow.dependencies, slow.start, slow.end), predicted.memory)
    seen = Seen(browser, tmp_path, replace(run, said="measured"), replace(predicted, said="predicted"))
    middle = [
        (float((slow.start[c] + slow.end[c]) / 2), int(slow.dependencies.rank[c])) for c in range(len(slow.start))
    ]
    start, end = predicted.timeline.start, predicted.timeline.end
    for cell, tip in enumerate(seen.tips(middle)):
        times = [
            f"{a:g} to {b:g} ms, {b - a:g} long"
            for a, b in ((slow.start[cell], slow.end[cell]), (start[cell], end[cell]))
        ]
        assert [f"measured: {times[0]}", f"predicted: {times[1]}"] == tip[3:5]
    lower = seen.hover(float(start[0] + end[0]) / 2, 0, 1)
    assert lower[3:5] == ["measured: 0 to 2 ms, 2 long", "predicted: 0 to 1 ms, 1 long"]
    assert lower[5] == "no wait: first on its rank, at time 0"
    upper = seen.hover(slow.end[2] - 0.5, 0)
    assert upper[0] == "0B0 on rank 0"
    assert (
        upper[5] == "needed 1B0 on rank 1, which ended at 8.75, and began 0.25 later (dependency 4.75, overhead 0.25)"
    )
    assert seen.hover(3.0, 1)[5] == "needed 0F0 on rank 0, which ended at 2, and began 0.25 later (warm-up)"
    assert seen.hover(1.0, 1) == [
        "idle on rank 1: warm-up",
        "0 to 2.25, 2.25 long",
        f"1F0 {seen.hover(3.0, 1)[5]}"[:-10],
    ]
    heads = browser.value(
        "[...document.querySelectorAll('table')].map(t => [...t.rows[0].cells].map(c => c.textContent))"
    )
    assert [head[3:-2] for head in heads] == [
        ["warm-up", "cooldown", "dependency", "overhead"],
        ["warm-up", "cooldown", "dependency", "imbalance"],
    ]
    left, top = browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())")
    x, y = seen.at(float(start[1]), 0, 1)
    read = f"canvas.getContext('2d').getImageData({x - left - 1}, {y - top}, 1, 1).data[0]"
    assert browser.value(read) > 200
    browser.click(*seen.at(3.0, 0))
    assert browser.value(read) < 60, "the same cell is outlined in the other chart"
    seen.finish()


def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    for payload in PAYLOADS:
        seen = Seen(browser, tmp_path, hostile(payload))
        assert browser.value("typeof window.hacked") == "undefined"
        assert payload[:8].strip() in str(browser.value("document.querySelector('h1').textContent"))
        assert browser.value("document.querySelectorAll('h1 *, p *:not(kbd), img, svg').length") == 0
        seen.finish()


def test_a_hundred_thousand_cells(browser: Browser, tmp_path: Path) -> None:
    chart = named("zbv", P=32, M=640)
    assert len(chart.cells) > 100_000
    seen = Seen(browser, tmp_path, chart)
    assert (tmp_path / "page.html").stat().st_size < 150_000
    assert browser.value("document.querySelectorAll('*').length") < 1000
    for _ in range(9):
        browser.mouse("Wheel", *seen.at(1000.5, 3), deltaX=0, deltaY=-500)
    rank = chart.cells.of_rank(3)
    cell = rank.start + int(np.searchsorted(chart.cells.start[rank], 1000.5, side="right")) - 1
    row = int(chart.cells.first[cell])
    assert seen.hover(1000.5, 3)[0] == chart.schedule.describe(row).replace("(", "on ").rstrip(")")
    seen.finish()
