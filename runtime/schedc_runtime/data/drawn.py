"""Numbers drawn as functions of a seed: permutations that need no memory, alike on all machines and versions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int64

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 6


def mixed(values: UInt64) -> UInt64:
    """[...] well mixed bits of numbers, one for one (Steele et al., 2014, Fast Splittable Generators, section 5)."""
    bits = values + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_bits: UInt64 = bits ^ (bits >> np.uint64(31))
    return mixed_bits


def key_of(*numbers: int) -> UInt64:
    """[1] the key that follows from some whole numbers, in their order."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key ^ np.array([number % (1 << 64)], np.uint64))
    return key


def shuffled(count: int, *seeds: int) -> Int64:
    """[count] a permutation of the numbers below ``count``."""
    drawn = mixed(key_of(*seeds) ^ mixed(np.arange(count, dtype=np.uint64)))
    return np.argsort(drawn, kind="stable").astype(np.int64)


def places(positions: Int64, count: int, *seeds: int) -> Int64:
    """[n] what a permutation of ``count`` numbers has at these positions. The permutation itself is never made.

    A Feistel network permutes the numbers of an even number of bits. It is walked on until a number is below ``count``
    (Black and Rogaway, 2002, Ciphers with Arbitrary Finite Domains, section 4).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [key_of(*seeds, number) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    walking = np.arange(values.size)
    while walking.size:
        left, right = values[walking] >> shift, values[walking] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        values[walking] = (left << shift) | right
        walking = walking[values[walking] >= np.uint64(count)]
    return values.astype(np.int64)
