"""Coloured text for terminals: styled characters, written with as few control sequences as possible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

PLAIN, CUBE, TRUE = 0, 256, 1 << 24
"""Numbers of colours: none (ASCII characters only), xterm's palette, all of RGB."""


@dataclass(frozen=True, slots=True)
class Style:
    """The look of characters. Colours are ``#rrggbb``; an empty string keeps the terminal's colour."""

    ink: str = ""
    fill: str = ""
    faint: bool = False
    underlined: bool = False
    bold: bool = False


NORMAL = Style()
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class StyledText:
    """Characters of one style."""

    characters: str
    style: Style = NORMAL


def paint(texts: Iterable[StyledText], colours: int) -> str:
    """Joins the texts, styled by control sequences; with `PLAIN` colours, the characters alone."""
    parts = []
    for style, run in groupby(texts, key=lambda text: text.style):
        characters = "".join(text.characters for text in run)
        codes = _codes(style, colours) if colours else []
        parts.append(f"\x1b[{';'.join(codes)}m{characters}{_RESET}" if codes else characters)
    return "".join(parts)


def _codes(style: Style, colours: int) -> list[str]:
    flags = [("1", style.bold), ("2", style.faint), ("4", style.underlined)]
    codes = [code for code, wanted in flags if wanted]
    for base, colour in ((38, style.ink), (48, style.fill)):
        if colour:
            codes.append(f"{base};{_true(colour)}" if colours == TRUE else f"{base};5;{_nearest(colour)}")
    return codes


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _true(colour: str) -> str:
    return "2;" + ";".join(map(str, _channels(colour)))


_STEPS = (0, 95, 135, 175, 215, 255)
"""Values of a channel in xterm's 6 x 6 x 6 cube, which has the numbers 16 to 231."""


def _nearest(colour: str) -> int:
    """The number of the colour in xterm's cube that is nearest in every channel."""
    red, green, blue = (min(range(6), key=lambda i: abs(_STEPS[i] - value)) for value in _channels(colour))
    return 16 + 36 * red + 6 * green + blue
