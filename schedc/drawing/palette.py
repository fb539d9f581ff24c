"""The colours of drawings, and the contrast that makes their text readable."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.ir.ops import FACTS, OpKind

HUES: dict[str, tuple[str, str]] = {
    "orange": ("#f7b267", "#b2530c"),
    "pale green": ("#d3e7a4", "#5b7518"),
    "blue": ("#a8c8f0", "#2f62a8"),
    "green": ("#7fc48a", "#23733a"),
    "purple": ("#e2b9ec", "#7d3c98"),
}
"""Fills by name, in two shades: pale under the dark inks, deep under the light ones."""

FILLS: dict[OpKind, tuple[str, str]] = {kind: HUES[FACTS[kind].colour] for kind in OpKind}
"""Fill of each kind in two shades. The hues are those of the DualPipe figures: forward orange, both backwards green,
weight gradient blue. Those figures have no recomputation, which is purple here."""

LANES: dict[str, str] = {
    "d2h": "#8fd0cf", "h2d": "#f0b3c4", "dp": "#c9c0e6", "rail": "#e8cf7a", "node": "#d9c3a5",
}  # fmt: skip
"""Fill of what runs on each lane beside compute, on either ground, under the first ink."""

INKS: tuple[str, ...] = ("#111111", "#ffffff", "#7a0b3a", "#fff4b8")
"""Colours of numerals by chunk: even chunks stand on the pale shade, odd chunks on the deep shade. The fifth chunk has
the ink of the first, since no reader tells five inks apart at a glance. The hover text always names the stage."""


@dataclass(frozen=True)
class Ground:
    """Colours of everything but work, as ``#rrggbb``. The fills and inks of work are the same on either ground.

    phases: tints of the phase strips, by phase; greyed, so that nobody takes them for work.
    """

    paper: str
    text: str
    muted: str
    grid: str
    idle: str
    hatch: str
    edge: str
    exposed: str
    curve: str
    curve_fill: str
    phases: tuple[str, ...]


LIGHT = Ground(
    paper="#ffffff", text="#1f2328", muted="#59636e", grid="#e4e7eb", idle="#f1f2f4", hatch="#c4cad1", edge="#000000",
    exposed="#c2185b", curve="#6b4fa0", curve_fill="#ece7f5",
    phases=(
        "#dcd6e8", "#e9dccb", "#cfdfe3", "#ecd3d6", "#dadad6", "#d3d8ea", "#e6e0bf", "#dfd0dd", "#cfe0d3", "#e8d5bf",
    ),
)  # fmt: skip

DARK = Ground(
    paper="#14171b", text="#e6e9ed", muted="#a3adb8", grid="#2a3037", idle="#1f242a", hatch="#3b434c", edge="#ffffff",
    exposed="#ff5fa2", curve="#b9a1ea", curve_fill="#3a3154",
    phases=(
        "#473c5d", "#5d4f3c", "#3c575d", "#5d3c40", "#505049", "#3c435d", "#5d583c", "#5d3c59", "#3c5d44", "#5d4e3c",
    ),
)  # fmt: skip

PHASES = LIGHT.phases


def shade_of(chunk: int) -> int:
    """The number of the shade that fills a chunk."""
    return chunk % 2


def ink_of(chunk: int) -> int:
    """The number in `INKS` of the colour of a chunk's numerals."""
    return chunk % len(INKS)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, from 0 to 1 (WCAG 2.2, definition "relative luminance")."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(ink: str, ground: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, definition "contrast ratio")."""
    low, high = sorted((luminance(ink), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


def text_pairs(ground: Ground) -> list[tuple[str, str]]:
    """Every (text, ground) pair that a drawing may use."""
    numerals = [(ink, fills[shade_of(i)]) for fills in FILLS.values() for i, ink in enumerate(INKS)]
    names = [(ground.text, tint) for tint in (*ground.phases, ground.paper, ground.idle)]
    lanes = [(INKS[0], fill) for fill in LANES.values()]
    return [*numerals, *names, *lanes, (ground.muted, ground.paper), (ground.curve, ground.paper)]
