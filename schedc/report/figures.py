"""Writes the figures and words of plans for people: seconds, large numbers, ordinals, values of axes."""

from __future__ import annotations

from math import log10

_SHORT = {"hierarchical": "hier", "allgather": "gather", "first_half": "half"}


def word(value: object) -> str:
    """A value of an axis, short."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _SHORT.get(str(value), str(value))


def seconds_text(seconds: float) -> str:
    """Seconds with four digits, without their unit."""
    return f"{seconds:#.4g}".rstrip(".")


def counted(number: float) -> str:
    """A large number with four digits and a letter for its thousands: ``15T``, ``65.98B``."""
    thousands = min(int(log10(max(number, 1.0))) // 3, 4)
    return f"{number / 1000**thousands:.4g}{('', 'K', 'M', 'B', 'T')[thousands]}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``11th``."""
    tens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if tens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
