"""The text of a page: it is safe with any names, and has the numbers of the analyses."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest

from schedc.drawing import palette
from schedc.drawing.chart import Chart
from schedc.drawing.html_columns import in_steps
from schedc.drawing.html_page import draw_html
from schedc.step.costs.costs import Costs
from support.charts import library_chart
from support.html_page import PAYLOADS, PageReader, hostile, tables_of
from support.random_schedules import random_schedule


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_cannot_become_markup(payload: str) -> None:
    plain = PageReader(draw_html([hostile("x")]))
    page = draw_html([hostile(payload)])
    read = PageReader(page)
    assert read.elements == plain.elements
    assert read.comments == []
    shown = read.page_data["charts"][0]
    assert shown["phases"][0].replace(" ", "").startswith(payload[:12].replace(" ", ""))
    assert not re.search("[\u2028\u2029\u202e\x00\x1b]", page)


def test_the_policy_names_what_the_page_holds_and_nothing_else() -> None:
    read = PageReader(draw_html([library_chart("1f1b")]))
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
        chart = Chart.predicted(random_schedule(seed), costs)
        page = draw_html([chart])
        assert page == draw_html([chart])
        read = PageReader(page).page_data
        ((data,), (tables,)) = read["charts"], tables_of(read)
        dependencies, cells, gaps = chart.timeline.dependencies, tables["cells"], tables["gaps"]
        close = 1e-11 * chart.timeline.makespan
        np.testing.assert_allclose(cells["start"], chart.timeline.start, rtol=0, atol=close)
        np.testing.assert_allclose(cells["end"], chart.timeline.end, rtol=0, atol=close)
        assert (cells["bound"] + np.arange(len(dependencies))).tolist() == chart.timeline.bound_by.tolist()
        assert cells["stage"].tolist() == chart.schedule.stage[dependencies.first].tolist()
        assert cells["microbatch"].tolist() == chart.schedule.microbatch[dependencies.first].tolist()
        assert tables["path"]["cell"].tolist() == chart.critical.tolist()
        pairs = cells.get("microbatch2", np.full(len(dependencies), -1))
        assert (pairs >= 0).tolist() == dependencies.pairs.tolist()
        for name in ("rank", "cell"):
            assert gaps[name].tolist() == getattr(chart.bubbles, name).tolist()
        np.testing.assert_allclose(gaps["start"], chart.bubbles.start, rtol=0, atol=close)
        for part, expected in enumerate(chart.bubbles.parts):
            np.testing.assert_allclose(gaps.get(f"part{part}", 0.0), expected, rtol=0, atol=close)
        np.testing.assert_allclose(np.sum(data["totals"], axis=0), data["bubble"], atol=10 * close)
        held = cells["held"]
        peaks = [
            held[dependencies.rank_start[r] : dependencies.rank_start[r + 1]].max(initial=0)
            for r in range(data["ranks"])
        ]
        assert peaks == data["peaks"]


@pytest.mark.parametrize(
    "values",
    [[], [0.0, 0.0], [0.1, 0.2, 0.1 + 0.2], [1 / 3, 1e-9, 2e5], [2.0**53 - 1, 1.0], [1e-280, 3e-281], [7e15, 0.5]],
)
def test_numbers_keep_twelve_digits_of_the_largest_in_as_few_steps_as_hold_them(values: list[float]) -> None:
    column = np.array(values)
    (steps,) = in_steps(column)
    np.testing.assert_allclose(
        steps.values / 10.0**steps.decimals, column, rtol=0, atol=5e-12 * np.abs(column).max(initial=0)
    )
    if column.size > 2 and column[0] == 0.1:
        assert (steps.values.tolist(), steps.decimals) == ([1, 2, 3], 1)


def test_names_of_phases_can_be_read_in_light_and_dark() -> None:
    style = PageReader(draw_html([library_chart("1f1b")])).style
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
