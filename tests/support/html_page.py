"""Pages of schedules for tests: a page read back from its text, and a page in a browser."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from schedc.drawing.chart import Chart
from schedc.drawing.html_page import draw_html
from schedc.step.costs.costs import Costs
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


class PageReader(HTMLParser):
    """The contents of a page: its elements with their attributes, comments, the style, the data and the script."""

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
    """The tables of each chart in a page's data, each a dict of columns, read back as the page reads them."""
    packed, offset = zlib.decompress(base64.b64decode(data["packed"])), 0
    charts = []
    for chart in data["charts"]:
        tables: dict[str, dict[str, Any]] = {}
        for name, table in chart["tables"].items():
            columns = tables[name] = {}
            for column, head in table["columns"].items():
                values = np.full(table["count"], head["low"])
                for place in range(head["width"]):
                    values += np.frombuffer(packed, np.uint8, table["count"], offset).astype(np.int64) << 8 * place
                    offset += table["count"]
                values = np.cumsum(values) if head["running"] else values
                assert not head["whole"] or np.array_equal(values, values.astype(np.int32))
                columns[column] = values / 10.0 ** head["decimals"] if head["decimals"] else values
            if "wait" in columns:
                edges = np.cumsum(np.stack([columns["wait"], columns["length"]], 1).ravel())
                columns["start"], columns["end"] = edges.reshape(-1, 2).T / 10.0 ** chart["timeDecimals"]
        charts.append(tables)
    assert offset == len(packed)
    return charts


def hostile(payload: str) -> Chart:
    schedule = random_schedule(7)
    renamed = replace(schedule, name=payload, doc=payload, sizes={payload: 1}, phases=(payload,))
    return Chart.predicted(renamed, Costs())


class PageView:
    """A page in the browser, which knows the places of lanes and times on the screen."""

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
        """px, the point of the screen at a time on a rank's lane."""
        return self.points([(time, rank)], chart)[0]

    def points(self, places: list[tuple[float, int]], chart: int = 0) -> list[tuple[float, float]]:
        box = self.browser.value("(({left, top, width}) => ({left, top, width}))(canvas.getBoundingClientRect())")
        state = self.browser.value("({...canvas.dataset})")
        gutter, low, high = (float(state[name]) for name in ("gutter", "from", "to"))
        scale = (box["width"] - gutter - float(state["right"])) / (high - low)
        first = box["top"] + float(state["tops"].split()[chart]) - float(state["scroll"]) + float(state["phases"]) + 8
        return [(box["left"] + gutter + (t - low) * scale, first + rank * float(state["pitch"])) for t, rank in places]

    def hover(self, time: float, rank: int, chart: int = 0) -> list[str]:
        """The lines of the tooltip at a time on a rank's lane."""
        return self.tips([(time, rank)], chart)[0]

    def tips(self, places: list[tuple[float, int]], chart: int = 0) -> list[list[str]]:
        tips = []
        for point in self.points(places, chart):
            self.browser.mouse("Moved", *point)
            tips.append(self.browser.now("tip.hidden ? [] : [...tip.children].map(line => line.textContent)"))
        return tips

    def colours(self, places: list[tuple[float, int]], chart: int = 0) -> list[str]:
        """The colours that are painted above the numerals at (time, rank) places."""
        left, top = self.browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())")
        points = [[x - left, y - top - 4] for x, y in self.points(places, chart)]
        read = "[...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
        pixels = self.browser.value(f"{points}.map(([x, y]) => {read})")
        return ["#" + "".join(f"{value:02x}" for value in pixel) for pixel in pixels]

    def finish(self) -> None:
        assert self.browser.faults == []
