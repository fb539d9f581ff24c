"""Copies of experts in drawings and exports: a strip for the links that carry them, with names, legend and hover."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cell.recorded_rows import write_recording
from schedc.cli import main
from schedc.compiler import Analysis
from schedc.drawing.chart import Chart
from schedc.drawing.html_page import draw_html
from schedc.drawing.terminal import draw_terminal
from schedc.plan.travelling import travelling_copies
from schedc.step.copy_runs import CopyRuns, copy_name
from support.chromium import Browser
from support.copied_plans import CELLS, LAYERS, LINES, MICROBATCHES, analysed, routed
from support.html_page import PageReader, PageView, tables_of

SVG = "{http://www.w3.org/2000/svg}"
WAYS = {"step": "  balance by step", "microbatch": "  balance by microbatch", "hot": "  hot 2"}
NODES = LINES.replace("1 x 4", "2 x 2 rail 50 GB/s").replace("flat", "hierarchical")
RAILS = CELLS.replace("node = 6", "node = 6, rail = 6")


@dataclass(frozen=True)
class Drawn:
    """A plan with copies, with the folder of its files."""

    step: Analysis
    folder: Path
    copies: CopyRuns


@pytest.fixture(scope="module", params=WAYS)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp(request.param)
    step = analysed(folder, routed(), WAYS[request.param])
    copies = travelling_copies(step)
    assert copies is not None
    return Drawn(step, folder, copies)


def names(copies: CopyRuns) -> Counter[tuple[int, str]]:
    return Counter((int(copies.rank[row]), copies.name(row)) for row in range(len(copies)))


def expected(step: Analysis) -> Counter[tuple[int, str]]:
    """Each layer's weights and gradients once, or once by microbatch; two layers on each rank."""
    turns = range(MICROBATCHES) if step.plan.copies_by_microbatch else (-1,)
    assert step.inside is not None
    lasting = step.inside.ranks.for_step if step.inside.ranks else None
    assert (lasting is None) == step.plan.copies_by_microbatch
    layers = [layer for layer in range(LAYERS) if lasting is None or lasting.weights[layer] > 0]
    return Counter(
        (layer // 2, copy_name(back, layer // 2, layer % 2, turn))
        for layer in layers for turn in turns for back in (False, True)
    )  # fmt: skip


def test_each_exchange_travels_once(drawn: Drawn) -> None:
    step, copies = drawn.step, drawn.copies
    assert step.inside is not None
    assert names(copies) == expected(step)
    assert copies.timeline is step.inside.late_wait
    assert (copies.exposed <= copies.finish - copies.begin + 1e-9).all()
    assert copies.begin.min() >= 0
    assert copies.finish.max() <= copies.timeline.makespan * (1 + 1e-12)
    for rank in range(step.schedule.ranks):
        own = np.flatnonzero(copies.rank == rank)
        assert (copies.begin[own][1:] >= copies.finish[own][:-1] - 1e-9).all(), "one exchange at a time on a lane"
    gradients = copies.gradients.astype(bool)
    took = [(copies.finish - copies.begin)[which].sum() for which in (~gradients, gradients)]
    assert took[1] == pytest.approx(2 * took[0])  # float32 beside bf16
    if (lasting := step.inside.ranks and step.inside.ranks.for_step) is not None:
        assert took[0] == pytest.approx(sum(lasting.weights))
        starts = np.array([copies.timeline.start[copies.timeline.dependencies.rank == rank].min() for rank in (0, 1)])
        last = np.array([copies.timeline.end[copies.timeline.dependencies.rank == rank].max() for rank in (0, 1)])
        first = copies.begin[~gradients & (copies.layer == 0)]
        assert (first <= starts[copies.rank[~gradients & (copies.layer == 0)]]).all()
        assert copies.finish[gradients] == pytest.approx(last[copies.rank[gradients]], rel=0.02)


def test_the_picture_names_each_exchange_on_its_strip(drawn: Drawn) -> None:
    output = drawn.folder / "a.svg"
    options = ["show", str(drawn.folder / "a.sched"), "--cost-file", str(cost_file(drawn)), "-o", str(output)]
    result = CliRunner().invoke(main, [*options, "--record", str(drawn.folder / "r.npz")])
    assert result.exit_code == 0, result.output
    root, copies = ET.parse(output).getroot(), drawn.copies
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "copy"]
    titles = [str(group.findtext(f"{SVG}title")).split("; ") for group in groups]
    assert Counter((int(title[-1].removeprefix("rank ")), title[0]) for title in titles) == names(copies)
    assert {title[1] for title in titles} == {"lane node"}
    boxes = [group.find(f"{SVG}rect") for group in groups]
    left, scale = scale_of(root, copies)
    edges = sorted((float(box.get("x", 0)), float(box.get("width", 0))) for box in boxes if box is not None)
    wanted = sorted((left + begin * scale, max(0.5, (finish - begin) * scale))
                    for begin, finish in zip(copies.begin, copies.finish, strict=True))  # fmt: skip
    np.testing.assert_allclose(edges, wanted, atol=0.03)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"weights of copies, gradients of copies (node)", "node"} <= texts
    assert any("times from inside cells" in text for text in texts if text)


def scale_of(root: ET.Element, copies: CopyRuns) -> tuple[float, float]:
    """px of time 0, and px per time unit, by the cells of rank 0."""
    lefts = [float(group[1].get("x", 0)) for group in root.iter(f"{SVG}g") if group.get("class") == "cell"]
    start = copies.timeline.start
    last = int(copies.timeline.dependencies.rank_start[1]) - 1
    return lefts[0] - start[0] * (lefts[last] - lefts[0]) / (start[last] - start[0]), (lefts[last] - lefts[0]) / (
        start[last] - start[0]
    )


def cost_file(drawn: Drawn) -> Path:
    path = drawn.folder / "cells.toml"
    path.write_text(CELLS)
    return path


def test_page_terminal_and_trace_have_them(drawn: Drawn) -> None:
    step, copies = drawn.step, drawn.copies
    chart = Chart.inside(step.schedule, step.memory, step.costs, copies)
    data = PageReader(draw_html([chart])).page_data
    (table,), facts = [each["works"] for each in tables_of(data)], data["charts"][0]["works"]
    kinds = [facts["kinds"][kind] for kind in table["kind"]]
    assert kinds == [("weights", "gradients")[int(back)] + " of copies" for back in copies.gradients]
    assert {facts["lanes"][lane] for lane in table["lane"]} == {"node"}
    for name in ("rank", "stage", "layer", "microbatch"):
        np.testing.assert_array_equal(table[name], getattr(copies, name))
    np.testing.assert_allclose(table["begin"], copies.begin)
    assert all(kind >= facts["joined"] for kind in table["kind"])
    assert "weights of copies, gradients of copies (node)" in draw_terminal([chart], 120, colours=0)
    result = CliRunner().invoke(main, [
        "export", str(drawn.folder / "a.sched"), "--cost-file", str(cost_file(drawn)),
        "--record", str(drawn.folder / "r.npz"), "--to", "trace",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    events = json.loads(result.output)["traceEvents"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X" and tracks[event["pid"], event["tid"]] == "node"]
    assert Counter((event["pid"], event["name"]) for event in slices) == names(copies)
    assert sum(event["dur"] for event in slices) == pytest.approx(1e3 * (copies.finish - copies.begin).sum())


def test_hot_experts_of_several_nodes_use_the_rail(tmp_path: Path) -> None:
    write_recording(tmp_path / "r.npz", routed())
    lanes = {}
    for way, line in WAYS.items():
        copies = travelling_copies(analysed(tmp_path, routed(), line, cells=RAILS, lines=NODES))
        lanes[way] = None if copies is None else set(copies.lane.tolist())
    assert lanes == {"step": {1}, "microbatch": {1}, "hot": {0}}


@pytest.mark.slow
def test_the_page_tells_an_exchange(browser: Browser, tmp_path: Path) -> None:
    step = analysed(tmp_path, routed(), WAYS["microbatch"])
    copies = travelling_copies(step)
    assert copies is not None
    row = int(np.argmax((copies.finish - copies.begin) * (copies.rank == 0)))
    view = PageView(browser, tmp_path, Chart.inside(step.schedule, step.memory, step.costs, copies))
    strip = float(view.state("cells")) - 8 + 0.5 * float(view.state("works"))
    x, y = view.at(float(copies.begin[row] + copies.finish[row]) / 2, 0)
    browser.mouse("Moved", x, y + strip)
    lines = browser.now("tip.hidden ? [] : [...tip.children].map(line => line.textContent)")
    assert lines[:2] == [f"{copies.name(row)} on rank 0", "lane node"]
    browser.mouse("Moved", x, y)
    assert "JOIN" not in browser.now("tip.textContent")
    view.finish()
