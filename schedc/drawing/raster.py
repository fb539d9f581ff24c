"""Drawings as PNG or PDF: CairoSVG (extra `pictures`) renders the SVG, always on the light ground."""

from __future__ import annotations

import re

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.drawing.markup import number
from schedc.source import NOWHERE

MOST_PIXELS = 100_000_000
"""Pixels of the largest PNG, which takes 400 MB while it is drawn."""
LONGEST_SIDE = 32_767
"""Pixels of the longest side of a PNG: the limit of cairo's image surfaces."""


def converted(svg: str, form: str) -> bytes:
    """A drawing of `schedc.drawing.style.document` as ``png``, one pixel per px, or ``pdf``.

    Raises `DiagnosticError` (S612) for a PNG with too many pixels, and ImportError or OSError where CairoSVG or the
    library cairo is missing.
    """
    import cairosvg

    if form == "pdf":
        return bytes(cairosvg.svg2pdf(bytestring=svg.encode()))
    _check_size(svg)
    return bytes(cairosvg.svg2png(bytestring=svg.encode()))


def _check_size(svg: str) -> None:
    width, height = (float(value) for value in re.findall(r' (?:width|height)="([\d.]+)"', svg[: svg.index(">")]))
    if width * height <= MOST_PIXELS and max(width, height) <= LONGEST_SIDE:
        return
    message = f"a PNG of {number(width)} x {number(height)} pixels is too large"
    limits = f"it can have {MOST_PIXELS // 10**6} million pixels, and {LONGEST_SIDE} on a side"
    remedy = "draw it narrower with --width, at smaller sizes with -D, or as SVG or PDF, which have no pixels"
    raise DiagnosticError([Diagnostic("S612", message, Label(NOWHERE), notes=(limits,), help=remedy)])
