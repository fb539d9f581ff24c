"""Levels of recomputation in ascending order, and the bytes of a number by the name of its type."""

from __future__ import annotations

from enum import StrEnum

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per number, by the name of its type."""
DEFAULT_DTYPE = "bf16"
"""The type of numbers that a plan counts with where it says none."""

EXPERT_FLOPS = 6
"""FLOPs of an expert's forward, per row, column of a token and column inside."""
_FIRST = 4
"""FLOPs of its first product, in the same unit. No gradient needs the result of the second one."""


def bytes_per_number(dtype: str) -> int:
    """Bytes of a number of type ``dtype``; those of `DEFAULT_DTYPE` for ""."""
    return BYTES[dtype or DEFAULT_DTYPE]


class Level(StrEnum):
    """What the backward recomputes, in ascending order: each level includes all earlier levels."""

    NONE = "none"
    NORM = "norm"
    ACT = "act"
    LIGHT = "light"
    MEDIUM = "medium"
    FULL = "full"
    LAYER = "layer"

    @property
    def exchanges(self) -> bool:
        """Whether the recomputed region holds collectives."""
        return self >= Level.FULL

    @property
    def place(self) -> int:
        """Number of the level in ascending order, from 0."""
        return _PLACES[self]

    def __lt__(self, other: str) -> bool:
        return self.place < Level(other).place

    def __le__(self, other: str) -> bool:
        return self.place <= Level(other).place

    def __gt__(self, other: str) -> bool:
        return self.place > Level(other).place

    def __ge__(self, other: str) -> bool:
        return self.place >= Level(other).place


_PLACES = {level: number for number, level in enumerate(Level)}


def recomputed_share(role: str, level: Level) -> float:
    """Share of a node's forward that a level recomputes, counted in products; 1 for nodes without products."""
    return first_product(level) / EXPERT_FLOPS if role in ("experts", "shared") else 1.0


def first_product(level: Level) -> int:
    """FLOPs of an expert that a level recomputes, in the unit of `EXPERT_FLOPS`."""
    return _FIRST if level >= Level.MEDIUM else 0
