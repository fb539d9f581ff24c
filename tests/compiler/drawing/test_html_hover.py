"""The tooltip of a page in a browser: its lines on a cell, on idle time, and on the reason of every wait."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedc.drawing.chart import Chart
from schedc.ir.ops import OpKind
from schedc.step.costs.costs import Costs
from schedc.step.timeline import observed, simulate
from support.charts import library_chart
from support.chromium import Browser
from support.html_page import PageView
from support.random_schedules import random_schedule


@pytest.mark.slow
def test_hover_tells_the_op_its_cost_and_the_reason_of_the_wait(browser: Browser, tmp_path: Path) -> None:
    view = PageView(browser, tmp_path, library_chart("1f1b", P=4, M=8))
    assert view.hover(11.5, 0) == [
        "0B0 on rank 0",
        "full backward of microbatch 0, stage 0 (chunk 0)",
        "phase steady",
        "10 to 12, cost 2",
        "waited 6 for 1B0 on rank 1 (dependency)",
        "activations held: at most 4, then 3",
    ]
    assert view.hover(1.5, 0)[4] == "no wait: rank busy with 0F0 until 1"
    assert view.hover(0.5, 0)[4] == "no wait: first on its rank, at time 0"
    assert view.hover(3.5, 3)[4] == "waited 3 for 2F0 on rank 2 (warm-up)"
    assert view.hover(8.0, 0) == ["idle on rank 0: dependency", "4 to 10, 6 long", "0B0 waited 6 for 1B0 on rank 1"]
    assert view.hover(32.0, 3) == ["idle on rank 3: cooldown", "27 to 33, 6 long", "nothing left to do"]
    view.finish()


@pytest.mark.slow
def test_waits_for_messages_and_pairs_are_named(browser: Browser, tmp_path: Path) -> None:
    view = PageView(
        browser, tmp_path, library_chart("1f1b", Costs(p2p=0.5), P=2, M=2), library_chart("dualpipev", P=4, M=10)
    )
    assert view.hover(6.0, 0)[4] == ("waited 3 for 1B0 on rank 1, whose message took 0.5 (dependency 2, message 1)")
    pair = view.hover(24.0, 0, 1)
    assert pair[0] == "7F4 & 0B0 on rank 0 (overlapped pair)"
    assert pair[1:3] == [
        "forward of microbatch 4, stage 7 (chunk 1)",
        "full backward of microbatch 0, stage 0 (chunk 0)",
    ]
    assert pair[5] == "waited 3 for 6F4 & 1B0 on rank 1 (dependency)"
    view.finish()


@pytest.mark.slow
def test_the_reason_of_every_wait(browser: Browser, tmp_path: Path) -> None:
    """Works out for each cell the inputs, their producers, and the times at which they are ready."""
    for seed in (3, 11, 40):
        schedule = random_schedule(seed)
        costs = Costs(F=tuple(1.0 + s for s in range(schedule.stages)), B=2.5, I=1.5, W=1.0, p2p=0.5)
        chart = Chart.predicted(schedule, costs)
        view = PageView(browser, tmp_path, chart)
        dependencies, end = chart.timeline.dependencies, chart.timeline.end
        row_of = {
            (int(schedule.stage[row]), OpKind(int(schedule.kind[row])) is OpKind.F, int(schedule.microbatch[row])): row
            for row in np.flatnonzero(schedule.kind != OpKind.W).tolist()
        }
        middles = ((chart.timeline.start + end) / 2).tolist()
        tips = view.tips(list(zip(middles, dependencies.rank.tolist(), strict=True)))
        for cell, tip in enumerate(tips):
            rank, start = int(dependencies.rank[cell]), float(chart.timeline.start[cell])
            free = float(end[cell - 1]) if cell > dependencies.rank_start[rank] else 0.0
            line = next(line for line in tip if line.startswith(("waited", "no wait")))
            if start == free:
                assert line.startswith("no wait: ")
                continue
            ready = {}
            for row in (int(dependencies.first[cell]), int(dependencies.second[cell])):
                is_forward = schedule.kind[row] == OpKind.F
                key = (int(schedule.stage[row]) + (-1 if is_forward else 1), is_forward, int(schedule.microbatch[row]))
                if row >= 0 and schedule.kind[row] != OpKind.W and key in row_of:
                    producer = row_of[key]
                    ready[producer] = end[dependencies.cell_of[producer]] + 0.5 * (schedule.rank[producer] != rank)
            producer = max(ready, key=lambda row: ready[row])
            assert ready[producer] == start
            name, on = schedule.describe(producer).rstrip(")").split(" (")
            assert re.match(
                rf"waited {start - free:g} for (\S+ & )?{name}( & \S+)? on {on}, whose message took 0.5", line
            )
        view.finish()


@pytest.mark.slow
def test_keys_hide_the_tooltip_until_the_pointer_moves(browser: Browser, tmp_path: Path) -> None:
    view = PageView(browser, tmp_path, library_chart("1f1b", P=4, M=8))
    x, y = view.at(11.5, 0)
    for key, time in (("c", 11.2), ("+", 11.4), ("ArrowLeft", 11.6), ("Escape", 11.8)):
        assert view.hover(time, 0) != []
        browser.value("canvas.focus()")
        browser.key(key)
        assert browser.value("tip.hidden"), key
    browser.key("0")
    browser.mouse("Moved", *(still := view.at(11.5, 0)))
    browser.key("+")
    browser.mouse("Moved", *still)  # browsers send this event when a page moves under a pointer at rest
    assert browser.value("tip.hidden")
    browser.mouse("Moved", x + 1, y)
    browser.mouse("Wheel", x + 1, y, deltaX=0, deltaY=-300)
    shown = browser.value("tip.textContent")
    browser.mouse("Wheel", x + 1, y, deltaX=0, deltaY=300)
    browser.mouse("Wheel", x + 1, y, deltaX=400, deltaY=0)
    assert browser.value("tip.textContent") != shown, "the tooltip tells what is under the pointer by now"
    view.finish()


@pytest.mark.slow
def test_phases_are_named_over_the_lanes(browser: Browser, tmp_path: Path) -> None:
    chart = library_chart("dualpipev", P=4, M=10)
    view = PageView(browser, tmp_path, chart)
    assert view.number("phases") >= 12
    names, runs = chart.cells.phase_names, chart.cells.phase_runs(1)
    for number, start, end in runs:
        x, y = view.at((start + end) / 2, 1)
        browser.mouse("Moved", x, y - 14)
        tip = browser.now("[...tip.children].map(line => line.textContent)")
        assert tip[0] == f"phase {names[number]} on rank 1"
        assert tip[1] == f"{start:g} to {end:g}, {end - start:g} long"
    start = next(start for number, start, _ in chart.cells.phase_runs(3) if names[number] == "steady")
    read = "Math.min(...canvas.getContext('2d').getImageData(x, y, 40, 8).data)"
    (left, top), box = (
        view.at(start, 3),
        browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())"),
    )
    dark = browser.value(f"(([x, y]) => {read})([{left - box[0]}, {top - box[1] - 19}])")
    assert dark < 80, "letters on a tint, which is pale"
    view.finish()


@pytest.mark.slow
def test_a_run_stands_above_its_prediction(browser: Browser, tmp_path: Path) -> None:
    predicted = library_chart("1f1b", P=2, M=3)
    slow = simulate(predicted.schedule, Costs(F=2.0, B=4.5, p2p=0.25))
    run = Chart.of_run(predicted.schedule, observed(slow.dependencies, slow.start, slow.end), predicted.memory)
    view = PageView(browser, tmp_path, replace(run, said="measured"), replace(predicted, said="predicted"))
    middle = [
        (float((slow.start[c] + slow.end[c]) / 2), int(slow.dependencies.rank[c])) for c in range(len(slow.start))
    ]
    start, end = predicted.timeline.start, predicted.timeline.end
    for cell, tip in enumerate(view.tips(middle)):
        times = [
            f"{a:g} to {b:g} ms, {b - a:g} long"
            for a, b in ((slow.start[cell], slow.end[cell]), (start[cell], end[cell]))
        ]
        assert [f"measured: {times[0]}", f"predicted: {times[1]}"] == tip[3:5]
    lower = view.hover(float(start[0] + end[0]) / 2, 0, 1)
    assert lower[3:5] == ["measured: 0 to 2 ms, 2 long", "predicted: 0 to 1 ms, 1 long"]
    assert lower[5] == "no wait: first on its rank, at time 0"
    upper = view.hover(slow.end[2] - 0.5, 0)
    assert upper[0] == "0B0 on rank 0"
    assert (
        upper[5] == "needed 1B0 on rank 1, which ended at 8.75, and began 0.25 later (dependency 4.75, overhead 0.25)"
    )
    assert view.hover(3.0, 1)[5] == "needed 0F0 on rank 0, which ended at 2, and began 0.25 later (warm-up)"
    assert view.hover(1.0, 1) == [
        "idle on rank 1: warm-up",
        "0 to 2.25, 2.25 long",
        f"1F0 {view.hover(3.0, 1)[5]}"[:-10],
    ]
    heads = browser.value(
        "[...document.querySelectorAll('table')].map(t => [...t.rows[0].cells].map(c => c.textContent))"
    )
    assert [head[3:-2] for head in heads] == [
        ["warm-up", "cooldown", "dependency", "overhead"],
        ["warm-up", "cooldown", "dependency", "imbalance"],
    ]
    left, top = browser.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())")
    x, y = view.at(float(start[1]), 0, 1)
    read = f"canvas.getContext('2d').getImageData({x - left - 1}, {y - top}, 1, 1).data[0]"
    assert browser.value(read) > 200
    browser.click(*view.at(3.0, 0))
    assert browser.value(read) < 60, "the same cell is outlined in the other chart"
    view.finish()
