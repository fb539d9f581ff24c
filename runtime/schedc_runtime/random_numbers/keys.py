"""Keys of random draws: 63-bit numbers made of seed, step, microbatch, and the place of a draw in the model."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

_MASK = 2**63 - 1


def microbatch_key(seed: int, step: int, microbatch: int, call: str = "step") -> int:
    """The key of a microbatch. step: number of training steps before. microbatch: its number over all replicas.

    call: ``step`` or ``evaluate``.
    """
    return _hashed(f"{seed}/{step}/{microbatch}/{call}")


@cache
def place_key(module: str, ordinal: int) -> int:
    """The key of the ``ordinal``-th draw of a module in one forward of the model. The exclusive or with
    `microbatch_key` is the seed of the draw."""
    return _hashed(f"{module}#{ordinal}")


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK
