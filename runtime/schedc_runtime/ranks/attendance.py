"""One number that says who has come to a round: how many ranks, how many with a text, and whether their values agree.

Each rank adds an amount to one counter: 1 to the number of ranks, 1 to the number of texts if the rank has one, and
checksums in the low bits. The checksums of a group with equal values cancel: the weights of its members add up to zero.
A member with another value leaves a rest. So the rank that comes last sees from the sum alone whether all groups agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

_BITS = 32
"""Most bits of a checksum. Two values are taken for equal once in two to the power of this."""
_SUM = 61
"""Bits that a round may add to the counter, a signed number of 64 bits."""
MOST = (1 << 63) - (1 << _SUM) - 1
"""The largest value of the counter at which a further round may begin."""


class Alike(NamedTuple):
    """A value (JSON) that some ranks must have in common. members: numbers of these processes, ascending."""

    value: Any
    members: tuple[int, ...]


class Attendance(NamedTuple):
    """A sum of amounts. come, telling: number of ranks, and of ranks with a text. equal: whether all groups agree."""

    come: int
    telling: int
    equal: bool


def counter_share(process: int, ranks: int, number: int, alike: Iterable[Alike], tells: bool) -> int:
    """What ``process``, one of ``ranks``, adds to the counter in round ``number``."""
    telling, come, modulus = _fields(ranks)
    checksums = (_weight(process, members) * _checksum(value, number) for value, members in alike)
    return come + tells * telling + sum(checksums) % modulus


def attendance(total: int, ranks: int) -> Attendance:
    """What the sum of the amounts of some of ``ranks`` says; ``equal`` only where all have come."""
    telling, come, modulus = _fields(ranks)
    return Attendance(total // come, total % come // telling, total % modulus == 0)


def _fields(ranks: int) -> tuple[int, int, int]:
    """The units of the two counts, and one above the largest checksum. Sums of all ranks stay in their fields."""
    width = ranks.bit_length()
    bits = min(_BITS, _SUM - 3 * width)
    return 1 << bits + width, 1 << bits + 2 * width, 1 << bits


def _checksum(value: Any, number: int) -> int:
    text = f"{number} {json.dumps(value, sort_keys=True)}"
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8).digest())


@lru_cache(maxsize=256)
def _weight(process: int, members: tuple[int, ...]) -> int:
    """The weight of one of the members: drawn by its number, and for the last so that all add up to zero."""
    *others, last = members
    return -sum(map(_drawn, others)) if process == last else _drawn(process)


def _drawn(process: int) -> int:
    return int.from_bytes(blake2b(f"{process}".encode(), digest_size=_BITS // 8).digest()) | 1
