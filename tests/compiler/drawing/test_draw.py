"""The SVG of a schedule, read back as XML: geometry, colours, text, size."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.drawing import palette, svg
from schedc.drawing.cells import Curve
from schedc.drawing.facts import origin_of
from schedc.drawing.layout import STRIP_LANE, STRIPS_ABOVE, Detail, DrawingLayout
from schedc.drawing.markup import quantity, text_width
from schedc.drawing.strips import coarse
from schedc.drawing.svg import draw_svg
from schedc.ir.ops import OpKind
from schedc.ir.placement import linear
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.memory import Memory, measure_memory
from schedc.step.timeline import Timeline, simulate
from support.orders import FOLDER, published, schedule, two_pipes
from support.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = ROOT / "docs" / "figures"
UNEVEN = Costs(F=1.0, I=1.0, W=0.5, FB=2.4, p2p=0.05, activation=3.0, pending_weight=1.0)
PAIR = ["0F0 0F1 (0F2;0B0) 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


@dataclass(frozen=True)
class Drawn:
    """A drawing, and the timeline and memory that it shows."""

    timeline: Timeline
    memory: Memory
    text: str

    @property
    def root(self) -> ET.Element:
        return ET.fromstring(self.text)

    def groups(self, word: str) -> list[ET.Element]:
        return [g for g in self.root.iter(f"{SVG}g") if word in g.get("class", "").split()]


def draw(of: Schedule, costs: Costs | None = None, **options: str) -> Drawn:
    timeline, memory = simulate(of, costs), measure_memory(of, costs)
    return Drawn(timeline, memory, draw_svg(of, timeline, memory, origin=origin_of(costs or Costs()), **options))


def rects(group: ET.Element, style: str = "") -> list[tuple[float, float]]:
    """(left, right) of the rectangles of a class."""
    boxes = [r for r in group.iter(f"{SVG}rect") if re.fullmatch(style or ".*", r.get("class", ""))]
    return [(float(r.get("x", 0)), float(r.get("x", 0)) + float(r.get("width", 0))) for r in boxes]


def lanes(groups: list[ET.Element]) -> dict[float, list[tuple[float, float]]]:
    """(left, right) of each group, by the top of its first rectangle, from the top down."""
    out: dict[float, list[tuple[float, float]]] = {}
    for group in groups:
        top = float(next(group.iter(f"{SVG}rect")).get("y", 0))
        inside = rects(group, "[FIWBR][01]|idle")
        out.setdefault(top, []).append((inside[0][0], inside[-1][1]))
    return dict(sorted(out.items()))


@pytest.mark.slow
@pytest.mark.parametrize("costs", [None, UNEVEN], ids=["unit", "uneven"])
@pytest.mark.parametrize("file", sorted(path.stem for path in FOLDER.glob("*.csv")))
def test_cells_and_bubbles_lie_where_the_timeline_says(file: str, costs: Costs | None) -> None:
    drawn = draw(published(file), costs)
    dependencies = drawn.timeline.dependencies
    cells = lanes(drawn.groups("cell"))
    assert [len(lane) for lane in cells.values()] == np.diff(dependencies.rank_start).tolist()
    edges = np.array([edge for lane in cells.values() for edge in lane])
    times = np.stack([drawn.timeline.start, drawn.timeline.end], 1)
    scale, left = np.polyfit(times.ravel(), edges.ravel(), 1)
    assert scale >= 14
    np.testing.assert_allclose(edges, left + scale * times, atol=0.02)
    bubbles = lanes(drawn.groups("bubble"))
    for rank, top in enumerate(cells):
        idle = bubbles.get(top, [])
        assert sum(b - a for a, b in idle) == pytest.approx(
            scale * drawn.timeline.bubble[rank], abs=0.02 * (1 + len(idle))
        )
        whole = sorted(cells[top] + idle)
        assert whole[0][0] == pytest.approx(left, abs=0.02)
        assert all(abs(b - a) < 0.03 for (_, b), (a, _) in pairwise(whole))


def test_hover_text_says_all_of_an_op() -> None:
    of = schedule(PAIR, linear(2, 3))
    of = replace(of, phases=("start", "end"), phase=(of.microbatch > 0).astype(np.int32))
    titles = [next(g.iter(f"{SVG}title")).text for g in draw(of).groups("cell")]
    assert titles[0] == "F forward, stage 0, microbatch 0; rank 0, 0 to 1; phase start; test.order:1:1"
    assert titles[2] == (
        "F forward, stage 0, microbatch 2 & B full backward, stage 0, microbatch 0; rank 0, 4 to 7; "
        "phase end; test.order:1:10"
    )


@pytest.mark.parametrize(("costs", "share"), [(None, 1 / 3), (UNEVEN, 0.4), (Costs(F=3.0, FB=2.0), 0.6)])
def test_a_pair_is_two_colours_in_one_border(costs: Costs | None, share: float) -> None:
    drawn = draw(published("dualpipev_P4_M8"), costs)
    pairs = drawn.groups("pair")
    assert len(pairs) == drawn.timeline.dependencies.pairs.sum()
    for pair in pairs:
        forward, backward = rects(pair, "F[01]"), rects(pair, "B[01]")
        assert (len(forward), len(backward), len(rects(pair, "edge"))) == (1, 1, 1)
        assert forward[0][1] == pytest.approx(backward[0][0], abs=0.02)
        width = backward[0][1] - forward[0][0]
        assert (forward[0][1] - forward[0][0]) / width == pytest.approx(share, abs=0.002)
        (edge,) = rects(pair, "edge")
        assert forward[0][0] < edge[0] < edge[1] < backward[0][1]
    assert all(
        not rects(cell, "edge")
        for cell in drawn.groups("cell")
        if cell not in pairs and "pair" not in cell.get("class", "")
    )


def test_numerals_are_microbatches_in_the_ink_of_their_chunk() -> None:
    of = published("dualpipe_P4_M8")
    drawn = draw(of)
    numerals = [t for g in drawn.groups("cell") for t in g.iter(f"{SVG}text")]
    assert [int(t.text or "") for t in numerals] == of.microbatch.tolist()
    inks = [t.get("class", "").split()[1] for t in numerals]
    assert inks == [f"i{int(m >= 4)}" for m in of.microbatch]


def curve_heights(drawn: Drawn) -> list[float]:
    """The highest point of each rank's curve, as a share of the highest point of all."""
    curves = [p.get("d", "") for p in drawn.root.iter(f"{SVG}path") if p.get("class") == "curve"][1:]
    strips = [p.get("d", "") for p in drawn.root.iter(f"{SVG}path") if p.get("class") == "holding"]
    heights = [-min(accumulate(map(float, re.findall(r"v(-?[\d.]+)", strip)))) for strip in strips]
    for curve in curves:
        base = float(re.findall(r"M\S+ ([\d.]+)", curve)[0])
        heights.append(base - min(float(y) for y in re.findall(r"V([\d.]+)", curve)))
    return [height / max(heights) for height in heights]


@pytest.mark.parametrize("file", ["1f1b_P4_M8", "zbv_P4_M8", "dualpipev_P4_M8"])
@pytest.mark.parametrize("costs", [None, UNEVEN], ids=["unit", "uneven"])
def test_the_curve_has_the_peak_and_the_times_of_memory(file: str, costs: Costs | None) -> None:
    drawn = draw(published(file), costs)
    peaks = drawn.memory.peak_memory
    np.testing.assert_allclose(curve_heights(drawn), peaks / peaks.max(), atol=0.01)
    labels = [t.text for t in drawn.root.iter(f"{SVG}text") if t.get("class") == "peak"]
    assert labels == [f"peak {quantity(peak)}" for peak in peaks]


def test_an_activation_is_held_until_its_backward_ends() -> None:
    drawn = draw(schedule(["0F0 0B0"], linear(1, 1)))
    curve = [p.get("d", "") for p in drawn.root.iter(f"{SVG}path")][-1]
    x0, base = map(float, re.findall(r"M(\S+) ([\d.]+)H", curve)[0])
    steps = [(float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", curve)]
    high = min(y for _, y in steps)
    (cells,) = lanes(drawn.groups("cell")).values()
    assert steps[0] == (x0, high)
    assert steps[-1] == (pytest.approx(cells[1][1]), base)
    assert all(y == high for _, y in steps[:-1])


HOSTILE = "</title><script>alert('&amp;')</script>\x00\x1b[31m\u202e]]> \" &#x0; <!-- "


def test_no_text_of_the_file_becomes_markup() -> None:
    of = schedule(PAIR, linear(2, 3))
    source = replace(of.source, name=HOSTILE) if of.source else None
    of = replace(of, name=HOSTILE, doc=HOSTILE, sizes={HOSTILE: 1}, phases=(HOSTILE,), source=source)
    plain, hostile = draw(schedule(PAIR, linear(2, 3))).root, draw(of).root
    allowed = {"svg", "title", "desc", "defs", "style", "pattern", "g", "rect", "path", "line", "circle", "text"}
    assert {element.tag.removeprefix(SVG) for element in hostile.iter()} <= allowed
    assert "<script>alert('&amp;')</script>" in "".join(next(hostile.iter(f"{SVG}desc")).itertext())
    assert all(not name.startswith("on") and "href" not in name for e in hostile.iter() for name in e.attrib)
    assert not any(c in "".join(hostile.itertext()) for c in "\x00\x1b\u202e")
    phases = len(draw(of).groups("phase"))
    assert len(list(hostile.iter(f"{SVG}g"))) == len(list(plain.iter(f"{SVG}g"))) + phases


def test_text_stays_on_the_canvas_and_numerals_in_their_cells() -> None:
    of = replace(
        schedule(PAIR, linear(2, 3), "a" * 300),
        doc="word " * 200,
        sizes={f"size{i}": 10**9 for i in range(40)},
        phases=tuple(f"phase{i}" * 5 for i in range(40)),
        phase=np.arange(12, dtype=np.int32),
    )
    for drawn in (draw(of), draw(of, Costs(F=1.0, W=0.02, I=0.3)), draw(published("zbv_P4_M8"), Costs(W=0.01))):
        root = drawn.root
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for text in root.iter(f"{SVG}text"):
            styles = text.get("class", "").split()
            size = float(text.get("font-size", 0)) or {"title": 18.0, "tick": 10.0, "peak": 11.0}.get(styles[0], 12.0)
            anchor = 0.5 if "n" in styles or styles == ["tick"] else 1.0 if "end-of" in styles else 0.0
            left = float(text.get("x", 0)) - anchor * text_width(text.text or "", size)
            assert 0 <= left <= left + text_width(text.text or "", size) <= width, text.text
            assert 0 < float(text.get("y", 0)) < height
        for cell in drawn.groups("cell"):
            numerals = list(cell.iter(f"{SVG}text"))
            fills = rects(cell, "[FIWBR][01]")
            assert len(numerals) <= len(fills)
            if len(numerals) == len(fills):
                for numeral, (a, b) in zip(numerals, fills, strict=True):
                    assert text_width(numeral.text or "", float(numeral.get("font-size", 0))) <= b - a
    tiny = [c for c in draw(published("zbv_P4_M8"), Costs(W=0.01)).groups("cell") if rects(c, "W[01]")]
    assert tiny
    assert not any(list(c.iter(f"{SVG}text")) for c in tiny)


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes() -> None:
    here = hashlib.sha256(draw(published("dualpipe_P4_M8"), UNEVEN).text.encode()).hexdigest()
    script = (
        "import hashlib, test_draw as t\n"
        "print(hashlib.sha256(t.draw(t.published('dualpipe_P4_M8'), t.UNEVEN).text.encode()).hexdigest())"
    )
    path = f"{Path(__file__).parent}:{ROOT / 'tests'}"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == here


def test_a_drawing_names_its_costs() -> None:
    uneven = draw(schedule(PAIR, linear(2, 3)), UNEVEN)
    assert "costs F = I = 1, W = 0.5, FB = 2.4, p2p = 0.05, activation = 3" in uneven.text


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipev", 4, 10), ("dualpipe", 8, 20)])
def test_the_figures_of_the_readme_are_what_is_drawn(name: str, ranks: int, microbatches: int) -> None:
    """Comments and line numbers of the source may differ. `make figures` renews the figures."""
    now = draw(legal_schedule(open_schedule(name), {"P": ranks, "M": microbatches}))
    kept = Drawn(now.timeline, now.memory, FIGURES.joinpath(f"{name}.svg").read_text())
    for element, expected in zip(now.root.iter(), kept.root.iter(), strict=True):
        assert (element.tag, element.attrib) == (expected.tag, expected.attrib)
        if element.tag == f"{SVG}text" and "muted" not in element.get("class", ""):
            assert element.text == expected.text


@pytest.mark.parametrize("ground", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_ground(ground: palette.Ground) -> None:
    poor = [(pair, palette.contrast(*pair)) for pair in palette.text_pairs(ground) if palette.contrast(*pair) < 4.5]
    assert poor == []


def test_contrast_is_that_of_the_definition() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("ground", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_fills_are_told_apart(ground: palette.Ground) -> None:
    """Fills of different meaning differ in at least one channel, by luminance or by hue."""
    fills = [fill for pair in palette.FILLS.values() for fill in pair] + [ground.idle]
    channels = np.array([[int(f[i : i + 2], 16) for i in (1, 3, 5)] for f in fills])
    apart = np.abs(channels[:, None] - channels[None]).sum(2) + 1000 * np.eye(len(fills), dtype=int)
    assert apart.min() >= 60


def many(ranks: int, microbatches: int) -> Schedule:
    """1F1B of any size, made from columns."""
    starts, kinds, batches = [0], [], []
    for rank in range(ranks):
        warm = min(ranks - 1 - rank, microbatches)
        steady = microbatches - warm
        kind = [[OpKind.F] * warm, [OpKind.F, OpKind.B] * steady, [OpKind.B] * warm]
        pairs = np.stack([np.arange(warm, microbatches), np.arange(steady)], 1).ravel()
        kinds.append(np.concatenate([np.array(k, np.int8) for k in kind]))
        batches.append(np.concatenate([np.arange(warm), pairs, np.arange(steady, microbatches)]))
        starts.append(starts[-1] + 2 * microbatches)
    stage = np.repeat(np.arange(ranks, dtype=np.int32), 2 * microbatches)
    none = np.zeros(stage.size, np.int32)
    batch = np.concatenate(batches).astype(np.int32)
    place, kind = linear(ranks, microbatches), np.concatenate(kinds)
    return Schedule("many", {}, place, np.array(starts), kind, stage, batch, none - 1, none, none)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "microbatches"), [(8, 313), (16, 3125), (128, 391)])
def test_strips_are_small_and_cover_what_is_busy(ranks: int, microbatches: int) -> None:
    of = many(ranks, microbatches)
    of = replace(of, phases=("forward", "backward"), phase=(of.kind > 0).astype(np.int32))
    assert len(of) > STRIPS_ABOVE
    drawn = draw(of)
    assert len(drawn.text.encode()) < 2_000_000
    assert drawn.groups("cell") == []
    assert f"{len(of)} cells as strips" in "".join(drawn.root.itertext())
    strips = drawn.groups("strip")
    assert len(strips) == ranks
    for rank, strip in enumerate(strips):
        path = next(strip.iter(f"{SVG}path"))
        step = float(re.findall(r"scale\((\S+) ", path.get("transform", ""))[0])
        busy = sum(map(int, re.findall(r"h(\d+)", path.get("d", "")))) * step
        (whole,) = rects(strip, "idle")
        pieces = path.get("d", "").count("h")
        assert busy / (whole[1] - whole[0]) == pytest.approx(
            drawn.timeline.busy[rank] / drawn.timeline.makespan, abs=(1 + pieces) * step / (whole[1] - whole[0])
        )
    assert next(strips[-1].iter(f"{SVG}path")).get("d", "").count("h") == 1, "the last rank never waits"
    highest = drawn.memory.peak_activations
    np.testing.assert_allclose(curve_heights(drawn), highest / highest.max(), atol=0.01)
    peaks = [t.text for t in drawn.root.iter(f"{SVG}text") if t.get("class") == "peak"]
    assert peaks == [f"peak {peak}" for peak in highest]


def test_of_very_many_ranks_some_have_lanes() -> None:
    drawn = draw(many(600, 4))
    named = [int(t.text[5:]) for t in drawn.root.iter(f"{SVG}text") if t.get("class") == "rank" and t.text]
    assert named == [*range(0, 599, 3), 599]
    assert "201 of 600 ranks, one of every 3 and the last" in "".join(drawn.root.itertext())
    peaks = [t.text for t in drawn.root.iter(f"{SVG}text") if t.get("class") == "peak"]
    assert peaks == [f"peak {peak}" for peak in drawn.memory.peak_activations[named]]


@pytest.mark.parametrize(("limit", "lanes"), [(500_000, 8), (12_000, 8), (8_500, 3)])
def test_too_large_a_drawing_gets_coarser(limit: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "LIMIT", limit)
    of = many(8, 200)  # 3200 cells, few enough for an element each
    shown = svg.picture(of, simulate(of), measure_memory(of))
    assert len(shown.text.encode()) <= limit
    assert shown.note in shown.text
    assert len(Drawn(simulate(of), measure_memory(of), shown.text).groups("strip")) == lanes


def test_the_smallest_and_the_emptiest() -> None:
    assert len(draw(schedule(["0F0 0B0"], linear(1, 1))).groups("cell")) == 2
    nothing = draw(schedule(["0F0 0B0"], linear(1, 1)), Costs(F=0.0, I=0.0, W=0.0))
    assert len(nothing.groups("cell")) == 2
    uneven = draw(schedule(["0F0 1F1 1B1 0B0", "1F0 1B0 0F1 0B1"], two_pipes(2, 2)), title="two pipes")
    assert next(uneven.root.iter(f"{SVG}title")).text == "two pipes"
    assert "chunk 1 (pipe 1)" in "".join(uneven.root.itertext())


def test_a_coarse_curve_keeps_the_shortest_peak() -> None:
    layout = DrawingLayout(80.0, 0.0, 0.0, 800.0, STRIP_LANE, 1, Detail(True, 9600, 1))
    curve = Curve(np.array([0.0, 5.0001, 5.0002, 10.0]), np.array([1.0, 9.0, 2.0, 0.0]))
    shown = coarse(curve, 10.0, layout)
    assert shown.held.tolist() == [1.0, 9.0, 2.0, 0.0]
    np.testing.assert_allclose(shown.times, [0.0, 5.0, 5.0125, 10.0])
