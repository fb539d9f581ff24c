"""Graphs: their nodes and edges, the escaping of their text, and their pictures where `dot` is installed."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cell import stage_shape
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.drawing.graph import MOST_NODES, drawn
from schedc.drawing.stage_graph import draw_stage_graph, longest_chain
from schedc.interchange.dot import schedule_graph
from schedc.load.library import open_schedule
from schedc.step.bubbles import critical_path
from schedc.step.timeline import simulate
from support.needs import needs
from support.paths import ROOT

HOPS = str(ROOT / "examples" / "costs" / "hops.toml")
PLAN = str(ROOT / "examples" / "04_plan" / "dsv3.sched")
SVG = "{http://www.w3.org/2000/svg}"

needs_dot = needs("dot")


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def laid_out(source: str) -> dict[str, Any]:
    """The graph as `dot` reads it: nodes, clusters and edges with their attributes."""
    run = subprocess.run(["dot", "-Tjson0"], input=source, capture_output=True, text=True, check=True)
    return dict(json.loads(run.stdout))


# The dependencies of a schedule


@needs_dot
@pytest.mark.parametrize(("name", "sizes"), [("dualpipev", {"P": 2, "M": 4}), ("zbv", {"P": 3, "M": 6})])
def test_the_graph_has_all_cells_their_order_and_values_and_the_critical_path(name: str, sizes: dict[str, int]) -> None:
    schedule = legal_schedule(open_schedule(name), sizes)
    timeline = simulate(schedule)
    dependencies = timeline.dependencies
    graph = laid_out(schedule_graph(schedule, timeline).source)
    cells = {
        node["_gvid"]: int(node["name"][1:])
        for node in graph["objects"]
        if node["name"].startswith("c") and "nodes" not in node
    }
    assert sorted(cells.values()) == list(range(len(dependencies)))
    clusters = [node for node in graph["objects"] if "nodes" in node]
    for rank, cluster in enumerate(clusters):
        inside = sorted(cells[node] for node in cluster["nodes"])
        assert inside == list(range(dependencies.rank_start[rank], dependencies.rank_start[rank + 1]))
    edges = {(cells[edge["tail"]], cells[edge["head"]]): edge for edge in graph["edges"]}
    values = {(int(p), c) for row in dependencies.producers for c, p in enumerate(row) if p >= 0}
    order = {(int(p), c) for c, p in enumerate(dependencies.previous) if p >= 0}
    assert set(edges) == values | order
    assert {edge for edge, of in edges.items() if of.get("style") == "dashed"} <= order - values
    path = critical_path(timeline).tolist()
    marked = {cells[node["_gvid"]] for node in graph["objects"] if node.get("class") == "critical"}
    assert marked == set(path)
    assert {edge for edge, of in edges.items() if of.get("class") == "critical"} == {*pairwise(path)}


def test_a_graph_of_too_many_cells_is_refused() -> None:
    large = legal_schedule(open_schedule("gpipe"), {"P": 8, "M": 200})
    with pytest.raises(DiagnosticError) as error:
        schedule_graph(large, simulate(large))
    assert error.value.diagnostics[0].code == "S608"
    with pytest.raises(DiagnosticError, match="S608"):
        draw_stage_graph("large", stage_shape(["dense"] * (MOST_NODES + 1)), CellCosts())


HOSTILE = r"""<b>&lt;"quoted"\N\l</b>" -> { rank=same } &#65; \G"""


@needs_dot
def test_names_of_any_kind_stay_text() -> None:
    schedule = replace(legal_schedule(open_schedule("1f1b"), {"P": 1, "M": 1}), name=HOSTILE, sizes={})
    svg = drawn(schedule_graph(schedule, simulate(schedule)), "svg")
    assert isinstance(svg, str)
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert f"{HOSTILE}, makespan 3" in texts


# A stage from inside


def test_the_longest_chain_of_a_stage_is_its_forward_bound() -> None:
    shape = stage_shape(["moe"])
    costs = CellCosts.of(
        {"attention": SegmentTimes(20), "shared": SegmentTimes(90), "experts": SegmentTimes(30)},
        {"dispatch.rail": 25, "combine.rail": 25},
    )
    chain, length = longest_chain(shape, costs)
    assert [shape.nodes[number].role for number in chain] == ["attention", "shared", "post"]
    assert length == 110
    assert longest_chain(shape, CellCosts()) == ([], 0.0)


@needs_dot
def test_a_stage_is_drawn_with_its_times_and_what_it_recomputes() -> None:
    run = schedc("show", "dualpipev", "--graph", "cells", "--cost-file", HOPS, "--format", "dot")
    graph = laid_out(run.stdout)
    assert graph["label"].startswith(r"dualpipev: segments and exchanges of stage 0, and of 1 to 7 alike\l")
    labels = [node["label"] for node in graph["objects"]]
    assert r"0.experts\nF 20, I 20, W 26\nweights\n" in labels
    assert r"0.routing.rail\nforward 1\nno gradient\n" in labels
    names = {node["_gvid"]: node["label"].partition(r"\n")[0] for node in graph["objects"]}
    shape = stage_shape(["dense", "moe"], "hierarchical")
    expected = {(shape.nodes[b].name, node.name) for node in shape.nodes for b in node.after}
    expected |= {("input", shape.nodes[0].name), (shape.nodes[-1].name, "output")}
    assert {(names[edge["tail"]], names[edge["head"]]) for edge in graph["edges"]} == expected
    plan = schedc("show", PLAN, "--graph", "cells", "--cell-stages", "12", "--format", "dot")
    assert "standard blocks as the plan lays them out" in plan.stderr
    assert r"3.experts\nweights\nrecomputed: 67 %\n" in plan.stdout
    assert "hot.rail" not in plan.stdout  # lent by step: no exchange of the stage
    standard = schedc("show", "1f1b", "--graph", "cells", "--format", "dot")
    assert "one standard MoE block in every stage, without times" in standard.stderr
    assert "0.dispatch.node" in standard.stdout


# The command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--graph", "--format", "html"), "a graph cannot be html: a graph is written as svg, png, pdf, dot"),
        (("-o", "x.gv"), "a chart cannot be dot"),
        (("--graph", "--cell", "F"), "--graph is drawn alone"),
        (("--graph", "--cell-stages", "1"), "--cell-stages needs --cell, or --graph cells"),
        (("--graph", "cells", "--cell-stages", "0,1"), "--cell-stages of a graph is one stage"),
        (("--graph", "cells", "--cell-stages", "4"), "1f1b has no stage 4; it has 0 to 3"),
        (("--graph", "edges"), "'edges' is no graph (dependencies, cells); write SCHEDULE before --graph"),
        (("--graph", "--format", "dot", "--width", "500"), "--width is the width of a picture"),
    ],
)
def test_wrong_use_of_graph_is_told(arguments: tuple[str, ...], says: str) -> None:
    result = schedc("show", "1f1b", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_without_dot_the_source_is_printed_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    picture = tmp_path / "x.svg"
    for options, code in (((), 0), (("--format", "svg"), 2), (("-o", str(picture)), 2)):
        result = schedc("show", "1f1b", "-D", "M=4", "--graph", *options)
        assert (result.exit_code, result.stdout.startswith("digraph schedule {")) == (code, True)
        assert "install graphviz (apt-get install graphviz" in result.stderr
    assert not picture.exists()
    exported = schedc("export", "1f1b", "-D", "M=4", "--to", "dot").stdout
    assert exported == schedc("show", "1f1b", "-D", "M=4", "--graph", "--format", "dot").stdout
    assert exported.count(" -> ") > 40


def test_a_dot_that_cannot_draw_the_format_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text(
        "#!/bin/sh\nwhile read line; do :; done\necho 'Format not recognized' >&2\nexit 1\n", encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for form in ("png", "svg"):
        result = schedc("show", "1f1b", "-D", "M=4", "--graph", "--format", form)
        assert result.exit_code == 2
        assert f"dot cannot draw this graph as {form}: Format not recognized" in result.stderr


def test_export_writes_no_source_into_a_picture(tmp_path: Path) -> None:
    result = schedc("export", "1f1b", "--to", "dot", "-o", str(tmp_path / "x.svg"))
    assert result.exit_code == 2
    assert "show SCHEDULE --graph" in result.stderr
    assert schedc("export", "1f1b", "--to", "dot", "-o", str(tmp_path / "x.gv")).exit_code == 0


@needs_dot
def test_a_graph_is_drawn_in_every_format(tmp_path: Path) -> None:
    for suffix, head in (("png", b"\x89PNG"), ("pdf", b"%PDF-"), ("svg", b"<?xml"), ("dot", b"digraph")):
        path = tmp_path / f"x.{suffix}"
        width = () if suffix == "dot" else ("--width", "900")
        assert schedc("show", "1f1b", "-D", "M=4", "--graph", "-o", str(path), *width).exit_code == 0
        assert path.read_bytes().startswith(head)
    assert int.from_bytes((tmp_path / "x.png").read_bytes()[16:20]) == 900
    svg = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert re.search(r'<svg width="675pt"', svg), "675 pt are 900 px"
    assert schedc("show", "1f1b", "-D", "M=4", "--graph").stdout.startswith("<?xml")
