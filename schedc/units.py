"""Converts numbers with their units to bytes and bytes per second, and writes them for people."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import ceil, floor, log10

UNITS: dict[str, float] = {
    **{f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}bit": 1000.0**power / 8 for power, prefix in enumerate("KMG", 1)},
}
"""What may stand behind a number of a plan, and how many bytes it is; elsewhere they are names."""
MAX_INT = 2**31 - 1
"""The largest whole number of the language."""


def bytes_of(value: float, unit: str) -> float | None:
    """Bytes of ``80 GB``; None for a unit that is not one of memory."""
    return value * UNITS[unit] if unit in UNITS and not unit.endswith("bit") else None


def speed_of(value: float, unit: str) -> float | None:
    """Bytes per second of ``50 GB/s`` or ``400 Gbit/s``; None for anything else."""
    unit, _, per = unit.partition("/")
    return value * UNITS[unit] if unit in UNITS and per == "s" else None


def amount(value: float, unit: str) -> float:
    """The number in bytes where it has a unit; unchanged where it has none."""
    return float(value if not unit else bytes_of(value, unit) or 0.0)


def shown(count: float, up: bool = False) -> str:
    """A number of bytes for people: ``1.5 GB``. up: rounded up, so that it can be written in a plan as a limit."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if abs(count) >= UNITS[unit]), "")
    return f"{plain(count / UNITS[unit], up, 4)} {unit}" if unit else f"{plain(count, up, 4)} B"


def plain(value: float, up: bool = False, digits: int = 6) -> str:
    """A number with so many digits; large numbers have no exponent. up: as for `shown`."""
    if up and value > 0:
        step = 10.0 ** (floor(log10(value)) + 1 - digits)
        value = ceil(value / step * (1 - 1e-12)) * step
    return f"{value:.{digits}g}" if abs(value) < 10.0**digits else f"{value:.0f}"


def equations(values: Mapping[str, object]) -> str:
    """``P = 4, M = 10``: how messages write values by name, such as sizes."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def digits(value: float) -> str:
    """A number in the digits of the language, which has no exponents."""
    if value == int(value):
        return str(int(value))
    return repr(value) if "e" not in repr(value) else format(Decimal(repr(value)), "f")


def exact_unit(value: float) -> str:
    """Bytes in the unit with the fewest digits, of the units that give the value back exactly."""
    exact = [
        f"{digits(value / size)} {unit}"
        for unit, size in UNITS.items()
        if value / size * size == value and value / size < MAX_INT
    ]
    return min(exact, key=len, default=f"{digits(value / UNITS['GB'])} GB")
