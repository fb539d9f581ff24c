"""Whole numbers in tuples of arguments, for which Triton compiles no kernel of their own.

Triton compiles anew for numbers that are 1 or multiples of 16, and `do_not_specialize` does not reach into tuples.
"""

from __future__ import annotations

from collections.abc import Iterable


def veiled(numbers: Iterable[int]) -> tuple[int, ...]:
    """16 n + 3 for each number n, which is never 1 and never a multiple of 16. A kernel shifts right by 4."""
    return tuple(16 * number + 3 for number in numbers)
