"""Graphs in the style of the drawings, built with the package graphviz and laid out by its program `dot`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

from graphviz import Digraph, escape

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.drawing.markup import plain_markup
from schedc.drawing.palette import DARK, LIGHT, Ground
from schedc.source import NOWHERE, Source

CRITICAL = {"color": LIGHT.exposed, "penwidth": "2.5", "class": "critical"}
"""Attributes of nodes and edges on the critical path."""
ORDER = {"color": LIGHT.muted, "style": "dashed"}
VALUE = {"color": LIGHT.text}

MOST_NODES = 600
"""Nodes of the largest graph. dot lays them out in about a second, and four times as many in 20 seconds."""

_INK = "#111111"
_FONT = "Helvetica"
_NODES = {
    "shape": "box", "style": "filled,rounded", "fontname": _FONT, "fontsize": "11", "margin": "0.08,0.04",
    "fillcolor": LIGHT.idle, "fontcolor": _INK,
}  # fmt: skip
_PX_PER_INCH = 96.0
_ANY_HEIGHT = 1000


def new_graph(name: str, title: Sequence[str], direction: str = "LR") -> Digraph:
    """An empty graph with a title of some lines. direction: `LR` or `TB`, the direction of its edges."""
    graph = Digraph(name)
    graph.attr(
        label=lines(title), labelloc="t", labeljust="l", rankdir=direction, newrank="true", fontname=_FONT,
        fontcolor=LIGHT.text, bgcolor=LIGHT.paper, pad="0.1", margin="0",
    )  # fmt: skip
    graph.attr("node", **_NODES)
    graph.attr("edge", arrowsize="0.6", fontname=_FONT, fontsize="10", fontcolor=LIGHT.text, **VALUE)
    return graph


def refuse_large(nodes: int, remedy: str, source: Source | None = None) -> None:
    """Raises `DiagnosticError` (S608) for a graph of more nodes than a picture can show."""
    if nodes <= MOST_NODES:
        return
    message, reason = f"a graph of {nodes} nodes is too large to be drawn", f"a picture has room for {MOST_NODES}"
    raise DiagnosticError([Diagnostic("S608", message, Label(NOWHERE), notes=(reason,), help=remedy, source=source)])


def graph_text(words: str) -> str:
    """A label of one line with the plain words: without markup, escape sequences or entities."""
    return str(escape(re.sub(r"&(?=#?\w+;)", "&amp;", plain_markup(words))))


def lines(rows: Sequence[str], align: str = "l", indent: str = "") -> str:
    """A label with a line per row. align: `l`, `n` (centred) or `r`. indent: blanks before each row."""
    return "".join(f"{indent}{graph_text(row)}\\{align}" for row in rows)


def has_dot() -> bool:
    """Whether the program `dot`, which lays graphs out, is installed."""
    return shutil.which("dot") is not None


def drawn(graph: Digraph, form: str, width: float | None = None) -> str | bytes:
    """The graph as ``svg``, ``png`` or ``pdf``, ``width`` px wide. An SVG has a dark ground for viewers that want one.

    Raises `graphviz.ExecutableNotFound` without `dot`.
    """
    sized = graph.copy()
    if form == "png":
        sized.attr(dpi=f"{_PX_PER_INCH:g}")
    if width is not None:
        sized.attr(size=f"{width / _PX_PER_INCH:.4f},{_ANY_HEIGHT}!")
    if form != "svg":
        return bytes(sized.pipe(format=form, quiet=True))
    head, tag, rest = str(sized.pipe(format="svg", encoding="utf-8", quiet=True)).partition("<svg")
    inside = rest.index(">") + 1
    return f"{head}{tag}{rest[:inside]}\n<style>{_on(DARK)}</style>{rest[inside:]}"


def _on(ground: Ground) -> str:
    """Style rules for the SVG of `dot`; they take precedence over the colours of its elements."""
    return (
        "@media (prefers-color-scheme:dark){"
        f"svg{{background:{ground.paper}}}.graph>polygon{{fill:none;stroke:none}}"
        f".graph>text,.cluster text,.edge text,.bare text{{fill:{ground.text}}}"
        f".cluster polygon{{fill:{ground.paper};stroke:{ground.hatch}}}"
        f".edge path{{stroke:{ground.muted}}}.edge polygon{{fill:{ground.muted};stroke:{ground.muted}}}"
        f".critical path,.critical polygon{{stroke:{ground.exposed}}}.edge.critical polygon{{fill:{ground.exposed}}}"
        "}"
    )
