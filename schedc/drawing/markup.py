"""Text of SVG elements: numbers, escaped strings, estimated widths, and the elements that drawings use."""

from __future__ import annotations

from html import escape

from schedc.diagnostics import clean

_WIDTHS = {
    **dict.fromkeys("ijl|'", 0.32), **dict.fromkeys("ftr.,:;!()[]/I· ", 0.42), **dict.fromkeys("mwMW@%…—", 1.0)
}  # fmt: skip
"""em, rounded up: widths of characters in DejaVu Sans, the widest of the fonts that drawings ask for."""


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros, never ``-0``."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def quantity(value: float) -> str:
    """A value for people: six significant digits, with an exponent only where one is needed."""
    return str(round(value)) if 1e6 <= abs(value) < 1e12 and value == round(value) else f"{value:.6g}"


def plain_markup(text: str) -> str:
    """``text`` on one line, without characters that XML forbids or that change how text is shown; not yet escaped."""
    return clean(" ".join(text.split()))


def content(text: str) -> str:
    """``text`` as the content of an element, escaped so that it stays text."""
    return escape(plain_markup(text), quote=False)


def markup_attribute(text: str) -> str:
    """``text`` as a quoted attribute value."""
    return f'"{escape(plain_markup(text))}"'


def text_width(text: str, size: float) -> float:
    """px, an upper estimate of the width of ``text`` at font size ``size`` in the fonts that drawings ask for."""
    return size * sum(_WIDTHS.get(c, 0.66 if c < "\u0300" else 1.05) for c in text)


def fit_text_width(text: str, size: float, width: float) -> str:
    """``text``, cut with an ellipsis where it is wider than ``width`` px."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[: len(text) - max(1, len(text) // 16)]
    return text.rstrip() + "…"


def label(x: float, y: float, text: str, style: str, **attributes: str) -> str:
    """A ``text`` element with its base line at ``y`` px."""
    extra = "".join(f" {name.replace('_', '-')}={markup_attribute(value)}" for name, value in attributes.items())
    return f'<text x="{number(x)}" y="{number(y)}" class="{style}"{extra}>{content(text)}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """A ``rect`` element; lengths in px."""
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" class="{style}"/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A ``line`` element; coordinates in px."""
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" class="{style}"/>'
