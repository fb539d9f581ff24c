"""Cells as a user sees them: the figures of `report`, and the drawing of one cell, read back."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cell import Half, Lane, cell_program, stage_shape
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.predict import predict
from schedc.cell.serial import serial
from schedc.cell.simulate import play
from schedc.cell.verify import verify_cell
from schedc.cli import main
from schedc.formulas.derive import derive
from schedc.formulas.grid import size_grid
from schedc.inputs import open_family
from support.paths import ROOT

FLAT = str(ROOT / "examples" / "costs" / "cells.toml")
HOPS = str(ROOT / "examples" / "costs" / "hops.toml")
SVG = "{http://www.w3.org/2000/svg}"
SIZES = ("-D", "P=2", "-D", "M=8")


def told(*arguments: str, code: int = 0) -> str:
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == code, run.output
    return run.stdout if code == 0 else run.stderr


def groups(text: str, word: str) -> list[ET.Element]:
    return [group for group in ET.fromstring(text).iter(f"{SVG}g") if group.get("class") == word]


# Times.


@pytest.mark.parametrize("kind", ["F", "B", "I", "W", "FB", "FI", "FW", "IW"])
def test_a_program_in_time_is_what_is_predicted(kind: str) -> None:
    shape = stage_shape(["dense", "moe"], "hierarchical")
    costs = CellCosts.of(
        {"attention": SegmentTimes(20, 20, 18), "experts": SegmentTimes(20, 20, 26), "relay": SegmentTimes(1, 1)},
        {"dispatch.rail": 25, "combine.rail": 25, "dispatch.node": 5, "combine.node": 5, "routing.rail": 1},
    )
    halves = (shape if "F" in kind or kind == "IW" else None), (shape if kind != "F" else None)
    for program in (cell_program(kind, *halves, costs), serial(kind, *halves)):
        assert verify_cell(program, *halves) == []
        played, predicted = play(program, *halves, costs), predict(program, *halves, costs)
        assert len(played.spans) == len(played.tasks)
        assert played.duration == predicted.duration
        assert sum(span.time for span in played.waits) == pytest.approx(predicted.exposed)
        for lane in (Lane.COMPUTE, Lane.NODE):  # on the rail, exchanges of counts and of rows overlap
            mine = sorted((span.begin, span.end) for span in played.spans if span.task.lane is lane and span.time)
            assert all(span[1] <= following[0] for span, following in pairwise(mine))
    assert predicted.duration == pytest.approx(predicted.compute + predicted.communication)  # the serial order


# Figures in text and JSON.


@pytest.mark.slow
def test_report_tells_what_cells_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    formulas = derive(open_family("1f1b"), grid=size_grid(open_family("1f1b"), 12, 4))
    monkeypatch.setattr("schedc.formulas.derive.derive", lambda tree, progress, seconds: formulas)
    facts = json.loads(told("report", "1f1b", *SIZES, "--cost-file", FLAT, "--json"))
    checked = json.loads(told("check", "1f1b", *SIZES, "--cost-file", FLAT, "--json"))["cells"]
    assert facts["cells"].pop("sizes") == {"P": 2, "M": 8}
    assert facts["cells"] == checked
    text = told("report", "1f1b", *SIZES, "--cost-file", FLAT)
    rail = checked["lanes"]["rail"]
    assert f"rail: communication {rail['busy']:g}, exposed {rail['exposed']:g}: hidden " in text
    assert f"bound by {checked['bound']}" in text
    assert "at P = 2, M = 8:" in text
    assert "cells from inside" not in told("report", "1f1b", *SIZES, "--cost-file", FLAT, "--latex")
    assert "cells" not in json.loads(told("report", "1f1b", "--json"))


# The drawing.


def test_a_cell_is_drawn_in_two_orders() -> None:
    text = told("show", "dualpipev", *SIZES, "--cell", "FB", "--cell-stages", "0,3", "--cost-file", HOPS)
    facts = json.loads(told("check", "dualpipev", *SIZES, "--cost-file", HOPS, "--json"))["cells"]
    pair = next(kind for kind in facts["kinds"] if kind["kind"] == "FB")
    texts = [element.text or "" for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert "dualpipev: inside F on stage 0 & B on stage 3" in texts
    assert f"overlapped: {pair['duration']:g}" in texts
    assert f"serial: {pair['serial']:g}" in texts
    assert f"activation leaves {pair['activation_at']:g}" in texts
    assert f"gradient leaves {pair['gradient_at']:g}" in texts
    tasks = groups(text, "task")
    titles = [task.findtext(f"{SVG}title") or "" for task in tasks]
    assert len(titles) == 2 * len({re.sub(r", \d.*", "", title) for title in titles})  # each step once in either order
    assert sum(title.startswith("0.dispatch.rail, forward") for title in titles) == 2
    waits = [wait.findtext(f"{SVG}title") or "" for wait in groups(text, "wait")]
    exposed = [float(re.search(r"\(([\d.]+)\)$", title)[1]) for title in waits]  # type: ignore[index]
    assert sum(exposed) == pytest.approx(pair["exposed"] + pair["communication"])
    scale = {
        round(float(box.get("width", 0)) / float(re.search(r"\(([\d.]+)\)$", title)[1]), 1)  # type: ignore[index]
        for task, title in zip(tasks, titles, strict=True)
        if (box := task.find(f"{SVG}rect")) is not None
    }
    assert len(scale) == 1  # one time axis


def test_a_cell_of_a_plan_is_drawn(tmp_path: Path) -> None:
    plan = tmp_path / "plan.sched"
    plan.write_text("sched 1\nplan a_b = 1f1b(P = 2, M = 4) {\n  layers 4\n}\n")
    text = told("show", str(plan), "--cell", "F", "--cell-stages", "1", "--cost-file", FLAT)
    assert "a_b: inside F on stage 1" in text


def test_the_terminal_shows_every_lane_within_its_width() -> None:
    text = told("show", "dualpipev", *SIZES, "--cell", "FB", "--cost-file", HOPS, "--format", "term")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    for lane in ("compute", "rail", "node"):
        assert sum(line.startswith(lane) for line in lines) >= 2
    serial = "".join(line[8:] for line in lines[next(i for i, x in enumerate(lines) if x.startswith("serial")) :])
    assert "xxx" in serial
    for part in ("F0 dense|", "F0 a", "I0 e", "I0 d", "W0 dense|"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cell", "FB"], "needs --cost-file with a table [cell]"),
        (["--cell-stages", "0,1"], "--cell-stages needs --cell"),
        (["--cell", "FB", "--with", "1f1b", "--format", "term", "--cost-file", FLAT], "drawn alone"),
        (["--cell", "FI", "--cost-file", FLAT], "has no cell FI; it has for example"),
        (["--cell", "F", "--cell-stages", "9", "--cost-file", FLAT], "has no cell F on stages 9 & 9"),
        (["--cell", "F", "--cell-stages", "x", "--cost-file", FLAT], "is not STAGE or STAGE,STAGE"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], says: str) -> None:
    assert says in " ".join(told("show", "dualpipev", *SIZES, *arguments, code=2).split())


def test_the_figure_of_the_docs_is_what_is_drawn() -> None:
    """`make figures` renews the drawing."""
    kept = (ROOT / "docs" / "figures" / "cell.svg").read_text(encoding="utf-8")
    assert told("show", "dualpipev", "--cell", "FB", "--cost-file", HOPS) == kept


def test_recomputed_segments_are_drawn_with_an_edge() -> None:
    from schedc.drawing.cell_chart import CellChart
    from schedc.drawing.cell_svg import draw_cell_svg
    from schedc.step.cells.cell_pricing import CellKind

    shape = stage_shape(["moe"])
    shape = type(shape)(
        tuple(type(n)(**{**vars(n), "recomputed": n.role == "experts"}) for n in shape.nodes), shape.outputs
    )
    costs = CellCosts.of(
        {"attention": SegmentTimes(20, 20, 18), "experts": SegmentTimes(20, 20, 26)}, {"dispatch.rail": 10}
    )
    program = cell_program("B", None, shape, costs)
    assert any(step.half is Half.RECOMPUTE for step in program.steps)
    kind = CellKind("B", (0, 0), 1, None, shape, program, predict(program, None, shape, costs))
    text = draw_cell_svg(CellChart.of("<&>", kind, (0, 0), costs))
    assert "&lt;&amp;&gt;: inside B on stage 0" in text
    assert (
        sum(box.get("class") == "paired" for box in ET.fromstring(text).iter(f"{SVG}rect")) == 3
    )  # the legend has one box
