"""Draws how many of a token's experts each group holds, where a token may use only its strongest groups.

A router keeps the groups with the largest sum of their two best scores (DeepSeek-V3, section 2.1.2). A token's best
experts then come from few groups: a group is strong because it holds some of them. No closed form is known for that.
The scores are independent and uniform between 0 and 1. A seed of its own makes every draw the same.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats

_MOST_TOKENS = 1 << 14
_LEAST_TOKENS = 1 << 6
_MOST_SCORES = 1 << 21
"""Scores that a draw takes at most, where these are enough for `_LEAST_TOKENS` tokens."""
_SEED = 20_480


@lru_cache(maxsize=64)
def drawn_counts(experts: int, top: int, groups: int, limit: int) -> npt.NDArray[np.intp]:
    """[tokens, groups] experts of each drawn token in each of ``groups``, ``top`` in all, in at most ``limit`` groups.

    Among the experts of a group every choice of that many is equally likely. The array is shared, and read-only.
    """
    size = experts // groups
    best = min(size, max(top, 2))
    tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, _MOST_SCORES // (groups * best)))
    scores = _best_scores((tokens, groups), size, best)
    strength = scores[..., :2].sum(-1)
    weakest = np.partition(strength, groups - limit, -1)[:, groups - limit, np.newaxis]
    scores[strength < weakest] = -1.0
    flat = scores.reshape(tokens, groups * best)
    last = np.partition(flat, groups * best - top, -1)[:, groups * best - top, np.newaxis]
    counts: npt.NDArray[np.intp] = (scores >= last[..., np.newaxis]).sum(-1)
    counts.flags.writeable = False
    return counts


def _best_scores(shape: tuple[int, int], size: int, best: int) -> Floats:
    """[tokens, groups, best] the largest of ``size`` uniform scores in each group, in descending order.

    The largest of n uniform numbers is a root: u ** (1 / n). Below it lie n - 1 numbers that are uniform again.
    """
    draws = np.random.default_rng(_SEED).random((*shape, best))
    return np.asarray(np.cumprod(draws ** (1.0 / (size - np.arange(best))), -1))
