"""The colours of a drawing and the rule they must keep: numerals that can be read."""

from __future__ import annotations

from schedc.ir.ops import OpKind

FILLS: dict[OpKind, tuple[str, str]] = {
    OpKind.F: ("#f7b267", "#b2530c"),
    OpKind.I: ("#d3e7a4", "#5b7518"),
    OpKind.W: ("#a8c8f0", "#2f62a8"),
    OpKind.B: ("#7fc48a", "#23733a"),
    OpKind.R: ("#e2b9ec", "#7d3c98"),
}
"""Fill of each kind in two shades: pale under the dark inks, deep under the light ones. The hues are those of
the DualPipe figures: forward orange, both backwards green, weight gradient blue. They have no recomputation, which is
purple here."""

INKS: tuple[str, ...] = ("#111111", "#ffffff", "#7a0b3a", "#fff4b8")
"""Colour of the numeral, by chunk: even ones stand on the pale shade, odd ones on the deep. Chunks beyond the
fourth start again, since no fifth ink is told apart at a glance; the hover text always names the stage."""

PHASES: tuple[str, ...] = (
    "#dcd6e8", "#e9dccb", "#cfdfe3", "#ecd3d6", "#dadad6", "#d3d8ea", "#e6e0bf", "#dfd0dd", "#cfe0d3", "#e8d5bf",
)  # fmt: skip
"""Tints of the phase strips, by phase: pale and greyed, so that they never read as work."""

TEXT = "#1f2328"
MUTED = "#59636e"
PAPER = "#ffffff"
GRID = "#e4e7eb"
IDLE = "#f1f2f4"
HATCH = "#c4cad1"
EDGE = "#000000"
EXPOSED = "#c2185b"
CURVE = "#6b4fa0"
CURVE_FILL = "#ece7f5"


def shade_of(chunk: int) -> int:
    """Which of the two shades a chunk is filled with."""
    return chunk % 2


def ink_of(chunk: int) -> int:
    """Which of `INKS` a chunk's numerals have."""
    return chunk % len(INKS)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, from 0 to 1 (WCAG 2.2, definition "relative luminance")."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, definition "contrast ratio")."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_pairs() -> list[tuple[str, str]]:
    """Every (text, ground) pair that a drawing may use."""
    numerals = [(ink, fills[shade_of(i)]) for fills in FILLS.values() for i, ink in enumerate(INKS)]
    labels = [(TEXT, tint) for tint in PHASES]
    return [*numerals, *labels, (TEXT, PAPER), (MUTED, PAPER), (CURVE, PAPER), (TEXT, IDLE)]
