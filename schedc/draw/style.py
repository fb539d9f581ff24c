"""The style sheet and the outer element of a drawing: everything it refers to is inside it."""

from __future__ import annotations

from schedc.draw import palette
from schedc.draw.layout import STRIP_LANE
from schedc.draw.markup import content, number

_FONT = "DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"

_RULES = (
    f"text{{font-family:{_FONT};fill:{palette.TEXT}}}",
    ".title{font-size:18px;font-weight:600}",
    ".t{font-size:12px}",
    f"text.muted{{fill:{palette.MUTED}}}",
    ".rank{font-size:13px;font-weight:600}",
    f"text.tick{{font-size:10px;fill:{palette.MUTED};text-anchor:middle}}",
    "text.left{text-anchor:start}text.end-of{text-anchor:end}",
    f"text.peak{{font-size:11px;fill:{palette.CURVE}}}",
    ".phase-name{font-size:9.5px}",
    f".grid{{stroke:{palette.GRID}}}.end{{stroke:{palette.MUTED};stroke-dasharray:3 3}}",
    ".idle{fill:url(#idle)}",
    f".edge,.paired{{fill:none;stroke:{palette.EDGE};stroke-width:2}}",
    f".exposed{{fill:{palette.EXPOSED}}}.leaves{{stroke:{palette.CURVE};stroke-width:1.5}}",
    f".held{{fill:{palette.CURVE_FILL}}}.curve{{fill:none;stroke:{palette.CURVE};stroke-width:1.2}}",
    f".holding{{fill:{palette.CURVE_FILL};stroke:{palette.CURVE};stroke-width:1.2}}.dot{{fill:{palette.CURVE}}}",
    ".n{text-anchor:middle}.i1,.i2,.i3{font-weight:600}",
    *(f"text.i{i}{{fill:{ink}}}" for i, ink in enumerate(palette.INKS)),
    *(f".p{i}{{fill:{tint}}}.q{i}{{stroke:{tint};stroke-width:3}}" for i, tint in enumerate(palette.PHASES)),
    *(
        f".{kind.name}{shade}{{fill:{fill};stroke:{palette.PAPER};stroke-width:.8}}"
        f".s{kind.name}{shade}{{stroke:{fill};stroke-width:{number(STRIP_LANE.cells)}}}"
        for kind, fills in palette.FILLS.items()
        for shade, fill in enumerate(fills)
    ),
)

_HATCH = (
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{palette.IDLE}"/><path d="M0 0V6" stroke="{palette.HATCH}"/></pattern>'
)


def document(parts: list[str], width: float, height: float, title: str, doc: str) -> str:
    """The whole file; width and height in px. ``doc`` becomes its description."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{content(title)}</title><desc>{content(doc)}</desc>",
        f"<defs><style>{''.join(_RULES)}</style>{_HATCH}</defs>",
        f'<rect width="100%" height="100%" fill="{palette.PAPER}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
