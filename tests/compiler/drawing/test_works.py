"""Works in drawings and exports: strips of lanes, times at JOINs, the memory between cells, and what targets refuse."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.drawing.ansi import TRUE
from schedc.drawing.chart import Chart
from schedc.drawing.html_page import draw_html
from schedc.drawing.markup import quantity
from schedc.drawing.svg import picture
from schedc.drawing.terminal import draw_terminal
from schedc.interchange.refusals import no_works
from schedc.interchange.targets import TARGETS
from schedc.ir.json import program_from_json
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program
from schedc.ir.works import FACTS, LANE_NAMES, WorkKind
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.bubbles import EXPOSED
from schedc.step.costs.costs import Costs
from support.charts import library_chart
from support.chromium import Browser
from support.html_page import PageReader, PageView, tables_of
from support.offloads import OFFLOADED, offloaded, offloaded_chart

SVG = "{http://www.w3.org/2000/svg}"
REPLICATED = """sched 1
plan r = interleaved_1f1b(P = 2, M = 4) {
  layers 4  parameters dense 4
  shard dense
}
"""
LARGE = OFFLOADED.replace("M = 8", "M = 1000")


@pytest.fixture(scope="module")
def chart() -> Chart:
    return offloaded_chart()


def svg_of(chart: Chart) -> ET.Element:
    return ET.fromstring(picture(chart.schedule, chart.timeline, chart.memory, chart.works).text)


def edges(box: ET.Element) -> tuple[float, float]:
    return float(box.get("x", 0)), float(box.get("x", 0)) + float(box.get("width", 0))


def boxes(root: ET.Element, word: str) -> list[tuple[float, float]]:
    """(left, right) of the first rectangle of each group of a class."""
    groups = (g.find(f"{SVG}rect") for g in root.iter(f"{SVG}g") if word in g.get("class", "").split())
    return [edges(box) for box in groups if box is not None]


def scale_of(root: ET.Element, chart: Chart) -> tuple[float, float]:
    """px of time 0, and px per time unit, by the cells of rank 0."""
    lefts = [left for left, _ in boxes(root, "cell")]
    last = int(chart.cells.rank_start[1]) - 1
    assert chart.cells.start[0] == 0
    return lefts[0], (lefts[last] - lefts[0]) / float(chart.cells.start[last])


def test_works_lie_on_the_strips_of_their_lanes(chart: Chart) -> None:
    root, works = svg_of(chart), chart.works
    assert works is not None
    assert (works.times.exposed > 0).any()
    left, scale = scale_of(root, chart)
    drawn = [g for g in root.iter(f"{SVG}g") if g.get("class") == "work"]
    assert len(drawn) == len(works)
    by_title = {g.findtext(f"{SVG}title"): g.find(f"{SVG}rect") for g in drawn}
    tops = defaultdict(set)
    for row in range(len(works)):
        work, rank = works.works.work(row), int(works.rank[row])
        (box,) = [b for t, b in by_title.items() if t and t.startswith(f"{work};") and t.endswith(f"rank {rank}")]
        assert box is not None
        assert box.get("class") == LANE_NAMES[work.lane]
        times = (works.times.begin[row], works.times.finish[row])
        assert edges(box) == pytest.approx([left + time * scale for time in times], abs=0.02)
        tops[rank, work.lane].add(box.get("y"))
    assert all(len(values) == 1 for values in tops.values())
    assert len({min(values) for values in tops.values()}) == len(tops)


def test_times_at_joins_are_hatched_inside_idle_time(chart: Chart) -> None:
    root, works = svg_of(chart), chart.works
    assert works is not None
    left, scale = scale_of(root, chart)
    stands = boxes(root, "stand")
    expected = [(left + begin * scale, left + end * scale) for _, begin, end in works.waits]
    np.testing.assert_allclose(sorted(stands), sorted(expected), atol=0.02)
    idle = boxes(root, "bubble")
    assert all(any(low - 0.02 <= begin and end <= high + 0.02 for low, high in idle) for begin, end in stands)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"offload (d2h)", "fetch (h2d)", "exposed: the rank stands at a JOIN"} <= texts


def test_idle_time_at_joins_has_a_class_of_its_own(chart: Chart) -> None:
    works, bubbles = chart.works, chart.bubbles
    assert works is not None
    exposed = [works.times.exposed[works.rank == rank].sum() for rank in range(chart.schedule.ranks)]
    np.testing.assert_allclose(bubbles.totals[EXPOSED], exposed)
    np.testing.assert_allclose(bubbles.totals.sum(0), chart.timeline.bubble)
    np.testing.assert_allclose(bubbles.parts.sum(0), bubbles.end - bubbles.start)
    assert (bubbles.parts >= 0).all()


def replay(program: Program) -> tuple[list[float], list[float]]:
    """[cells] the most held while each runs, and from its end to the start of the next, counted row by row."""
    inside: list[float] = []
    behind: list[float] = []
    for rank in range(program.ranks):
        held = 0.0
        for row in range(program.rank_start[rank], program.rank_start[rank + 1]):
            x = program.instruction(row)
            if x.kind in (InstructionKind.START, InstructionKind.JOIN):
                work = program.works.work(int(program.work[row]))
                facts = FACTS[work.kind]
                held += work.bytes * (facts.at_start if x.kind is InstructionKind.START else facts.at_join)
                behind[-1] = max(behind[-1], held)
            elif x.kind <= InstructionKind.CELL:
                kinds = (
                    [InstructionKind.F, OpKind(int(program.backward[row]))]
                    if x.kind is InstructionKind.CELL
                    else [x.kind]
                )
                most = held
                for kind in kinds:
                    held += {"F": 1.0, "B": -1.0, "W": -1.0}.get(kind.name, 0.0)
                    most = max(most, held)
                inside.append(most)
                behind.append(held)
    return inside, behind


def test_the_curve_is_that_of_what_stays_on_the_device(chart: Chart) -> None:
    inside, behind = replay(offloaded().program())
    np.testing.assert_allclose(chart.cells.held, inside)
    np.testing.assert_allclose(chart.cells.after, behind)
    assert max(chart.cells.curve(rank).peak for rank in range(2)) == 3  # the plan's memory


def test_large_drawings_have_a_path_per_lane() -> None:
    chart = offloaded_chart(LARGE)
    assert len(chart.cells) > 4000
    root = svg_of(chart)
    paths = Counter(path.get("class") for path in root.iter(f"{SVG}path"))
    assert (paths["d2h"], paths["h2d"], paths["standing"]) == (2, 2, 2)
    titles = [g.findtext(f"{SVG}title") for g in root.iter(f"{SVG}g") if g.get("class") == "lane"]
    assert titles[0] == f"rank 0, lane d2h: {chart.works.on(0, 0).size} works"  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("colours", [0, TRUE])
def test_the_terminal_has_a_line_per_lane(chart: Chart, colours: int) -> None:
    text = re.sub(r"\x1b\[[\d;]*m", "", draw_terminal([chart], 120, colours=colours))
    lines = text.splitlines()
    assert [line[:6].strip() for line in lines[3:9]] == ["rank 0", "d2h", "h2d", "rank 1", "d2h", "h2d"]
    works = chart.works
    assert works is not None
    named = [int(number) for number in re.findall(r"\d+", lines[4][7:])]
    moved = works.works.microbatch[(works.rank == 0) & (works.works.kind == WorkKind.OFFLOAD)].tolist()
    assert named == moved
    assert ("╳" if colours else "x") in lines[6]
    assert "offload (d2h)" in text
    assert "exposed" in lines[-1]
    assert all(len(line) <= 120 for line in lines)


def test_a_trace_has_a_track_per_lane(chart: Chart) -> None:
    step, works = offloaded(), chart.works
    assert works is not None
    events = json.loads(TARGETS["trace"].write(step.schedule, step.costs, step.works))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        slices[names[event["pid"], event["tid"]]].append(event)
    assert len(slices["d2h"]) == len(slices["h2d"]) == len(works) // 2
    assert sum(event["dur"] for event in slices["at JOINs"]) == pytest.approx(1000 * works.times.exposed.sum())
    first = slices["d2h"][0]
    assert re.fullmatch(r"offload \dF\d", first["name"])
    assert first["args"]["memory"] == 1.0
    ends = [event["ts"] + event["dur"] for event in slices["forward"] + slices["backward"]]
    assert max(ends) == pytest.approx(1000 * chart.timeline.makespan)
    held = [e["args"]["activations"] + e["args"]["pending W"] for e in events if e["ph"] == "C"]
    assert max(held) == 3


def test_works_among_replicas_have_a_strip_in_every_drawing() -> None:
    """Interleaved 1F1B whose ranks gather, drop and sum both of their stages."""
    step = analyse(Text(Source("r.sched", REPLICATED)), {}, Costs(dp=1.0), 4)
    chart = Chart.of(step.schedule, step.timeline, step.memory, step.costs, step.works)
    works = chart.works
    assert works is not None
    assert len(works) == 2 * 2 * 4
    root = svg_of(chart)
    rects = [g.find(f"{SVG}rect") for g in root.iter(f"{SVG}g") if g.get("class") == "work"]
    assert [rect.get("class") for rect in rects if rect is not None] == ["dp"] * len(works)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"gather, drop, scatter, spread (dp)", "dp", "ga0", "sc3"} <= texts
    lines = draw_terminal([chart], 120, colours=0).splitlines()
    assert [line[:6].strip() for line in lines[4:8]] == ["rank 0", "dp", "rank 1", "dp"]
    assert "ga0" in lines[5]
    (table,) = (table["works"] for table in tables_of(PageReader(draw_html([chart])).page_data))
    assert set(table["microbatch"]) == {-1}
    events = json.loads(TARGETS["trace"].write(step.schedule, step.costs, step.works))["traceEvents"]
    assert sum(event["ph"] == "X" and event.get("name") == "gather 2" for event in events) == 1


@pytest.mark.parametrize("name", TARGETS)
def test_each_target_has_works_or_says_so(name: str) -> None:
    step, target = offloaded(), TARGETS[name]
    if target.works:
        text = target.write(step.schedule, step.costs, step.works)
        assert text != target.write(step.schedule, step.costs)
        if name == "json":
            assert program_from_json(text).works == step.program().works
    elif not target.without_works:
        with pytest.raises(DiagnosticError) as caught:
            no_works(step.works, name, None)
        assert caught.value.diagnostics[0].code == "S613"
        no_works(None, name, None)


def test_the_page_has_the_works_in_a_table(chart: Chart) -> None:
    works = chart.works
    assert works is not None
    data = PageReader(draw_html([chart])).page_data
    table, facts = tables_of(data)[0]["works"], data["charts"][0]["works"]
    order = np.lexsort((works.times.begin, works.works.lane, works.rank))
    for name in ("kind", "lane", "stage", "microbatch"):
        np.testing.assert_array_equal(table[name], getattr(works.works, name)[order])
    for name in ("begin", "finish", "exposed"):
        np.testing.assert_allclose(table[name], getattr(works.times, name)[order])
    np.testing.assert_array_equal(table["rank"], works.rank[order])
    assert [facts["sizes"][i] for i in table["size"]] == ["1"] * len(works)
    assert data["classes"][EXPOSED] == "exposed"
    plain = PageReader(draw_html([library_chart("1f1b", P=2, M=2)])).page_data
    assert "works" not in plain["charts"][0] and "exposed" not in plain["classes"]  # noqa: PT018


@pytest.mark.slow
def test_the_page_tells_works_and_times_at_joins(browser: Browser, tmp_path: Path, chart: Chart) -> None:
    works = chart.works
    assert works is not None
    view = PageView(browser, tmp_path, chart)
    row, begin, end = next(works.waits)
    rank, work = int(works.rank[row]), works.works.work(row)
    place = works.lanes_of(rank).index(work.lane)
    strip = float(view.state("cells")) - 8 + (place + 0.5) * float(view.state("works"))
    above = sum(len(works.lanes_of(other)) for other in range(rank)) * float(view.state("works"))
    (x, y) = view.at((float(works.times.begin[row]) + end) / 2, rank)
    browser.mouse("Moved", x, y + above + strip)
    lines = browser.now("tip.hidden ? [] : [...tip.children].map(line => line.textContent)")
    assert lines[0] == f"{work} on rank {rank}"
    assert lines[1] == f"lane {LANE_NAMES[work.lane]}, moves 1"
    assert lines[3] == f"the rank stands {quantity(end - begin)} at its JOIN"
    browser.mouse("Moved", *np.add(view.at((begin + end) / 2, rank), (0, above)).tolist())
    lines = browser.now("tip.hidden ? [] : [...tip.children].map(line => line.textContent)")
    assert re.match(rf"idle on rank {rank}: .*exposed", lines[0])
    assert f"stood {quantity(end - begin)} at the JOIN of the {work}" in lines[2]
    view.finish()
