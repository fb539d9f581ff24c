"""The style sheet and the outer element of a drawing, which refers to nothing outside itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from schedc.drawing import palette
from schedc.drawing.layout import STRIP_LANE
from schedc.drawing.markup import content, number
from schedc.drawing.palette import DARK, LIGHT, Ground

_FONT = "DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"

_SHAPES = (
    f"text{{font-family:{_FONT}}}",
    ".title{font-size:18px;font-weight:600}",
    ".t{font-size:12px}",
    ".rank{font-size:13px;font-weight:600}",
    "text.tick{font-size:10px;text-anchor:middle}",
    "text.left{text-anchor:start}text.end-of{text-anchor:end}",
    "text.peak{font-size:11px}",
    ".phase-name{font-size:9.5px}",
    ".end{stroke-dasharray:3 3}",
    ".idle{fill:url(#idle)}",
    ".edge,.paired{fill:none;stroke-width:2}",
    ".leaves{stroke-width:1.5}",
    ".curve{fill:none}.curve,.holding{stroke-width:1.2}",
    ".n{text-anchor:middle}.i1,.i2,.i3{font-weight:600}",
    *(f"text.i{i}{{fill:{ink}}}" for i, ink in enumerate(palette.INKS)),
    *(f".q{i}{{stroke-width:3}}" for i in range(len(palette.PHASES))),
    *(
        f".{kind.name}{shade}{{fill:{fill};stroke-width:.8}}"
        f".s{kind.name}{shade}{{stroke:{fill};stroke-width:{number(STRIP_LANE.cells)}}}"
        for kind, fills in palette.FILLS.items()
        for shade, fill in enumerate(fills)
    ),
)
"""Rules that hold on either ground: sizes, and the colours of work."""

_CELLS = ",".join(f".{kind.name}{shade}" for kind, fills in palette.FILLS.items() for shade in range(len(fills)))


def _colours(ground: Ground) -> str:
    """The rules of one ground."""
    rules = (
        f"text{{fill:{ground.text}}}",
        f"text.muted,text.tick{{fill:{ground.muted}}}",
        f"text.peak,.dot{{fill:{ground.curve}}}",
        f".paper{{fill:{ground.paper}}}.ground{{fill:{ground.idle}}}.hatch{{stroke:{ground.hatch}}}",
        f".grid{{stroke:{ground.grid}}}.end{{stroke:{ground.muted}}}",
        f"{_CELLS}{{stroke:{ground.paper}}}.edge,.paired{{stroke:{ground.edge}}}",
        f".exposed{{fill:{ground.exposed}}}.held,.holding{{fill:{ground.curve_fill}}}",
        f".curve,.holding,.leaves{{stroke:{ground.curve}}}",
        *(f".p{i}{{fill:{tint}}}.q{i}{{stroke:{tint}}}" for i, tint in enumerate(ground.phases)),
    )
    return "".join(rules)


_STYLE = f"{''.join(_SHAPES)}{_colours(LIGHT)}@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"
"""The light ground, unless the viewer asks for the dark one. A viewer without media queries draws the light one."""

_WORKS = "".join((
    ".lane-name{font-size:8px;text-anchor:end}",
    ".stands{fill:url(#stands)}",
    f".standing{{stroke-width:{number(STRIP_LANE.cells)}}}",
    *(
        f".{lane}{{fill:{fill}}}path.{lane}{{stroke:{fill};stroke-width:{number(STRIP_LANE.works - 2)}}}"
        for lane, fill in palette.LANES.items()
    ),
))  # fmt: skip
"""Rules of works and copies, on either ground."""


def _colours_of_works(ground: Ground) -> str:
    lanes = ",".join(f".{lane}" for lane in palette.LANES)
    return (
        f"{lanes}{{stroke:{ground.paper};stroke-width:.8}}.standing,.stand-hatch{{stroke:{ground.exposed}}}.stand-ground{{fill:{ground.paper}}}"
        f"text.lane-name{{fill:{ground.muted}}}"
    )


_HATCH_OF_JOINS = (
    '<pattern id="stands" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="5" height="5" class="stand-ground"/><path d="M0 0V5" class="stand-hatch" stroke-width="2.4"/>'
    "</pattern>"
)


class StyleSheet(NamedTuple):
    """Rules and patterns that some drawings add to the common rules."""

    rules: str = ""
    patterns: str = ""


NO_MORE = StyleSheet()
"""What most drawings add."""


def sheet(shapes: str, colours: Callable[[Ground], str], patterns: str = "") -> StyleSheet:
    """A sheet of rules for either ground, and of colours for each."""
    rules = f"{shapes}{colours(LIGHT)}@media (prefers-color-scheme:dark){{{colours(DARK)}}}"
    return StyleSheet(rules, patterns)


WORKS = sheet(_WORKS, _colours_of_works, _HATCH_OF_JOINS)
"""What drawings of works and copies add."""

_HATCH = (
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="ground"/><path d="M0 0V6" class="hatch"/></pattern>'
)


def document(parts: list[str], width: float, height: float, title: str, doc: str, more: StyleSheet = NO_MORE) -> str:
    """The whole file. width, height: px. doc: becomes the description of the drawing."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{content(title)}</title><desc>{content(doc)}</desc>",
        f"<defs><style>{_STYLE}{more.rules}</style>{_HATCH}{more.patterns}</defs>",
        '<rect width="100%" height="100%" class="paper"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
