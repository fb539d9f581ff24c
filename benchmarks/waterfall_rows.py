"""Rows of data with a stated skew for `waterfall.py`, as they come and as `schedc_runtime.data` deals and orders them.

As they come, rows of a replica are alike: their squared lengths are 2 - delta times the mean on the first replica, and
delta times it on the last one. All replicas share experts, so that each position waits for the largest.
"""

from __future__ import annotations

import numpy as np
from drawn_routing import RANKS
from waterfall_steps import PIPELINE

from schedc.compiler import compile as compile_schedule
from schedc.ir.arrays import Floats
from schedc_runtime.data import deal, order, pricer_of

_WHOLE = 1_000_000
"""The mean of squared lengths in whole numbers."""


def squares_of(dealt: bool, delta: float, microbatches: int) -> Floats:
    """[replicas, microbatches] squared lengths of the rows over their mean. dealt: by cost, and ordered."""
    given = np.repeat(np.linspace(2 - delta, delta, RANKS)[:, None], microbatches, axis=1)
    if not dealt:
        return given
    rows = deal(np.rint(given.ravel() * _WHOLE).astype(np.int64), microbatches, RANKS, RANKS)
    program = compile_schedule("adaptive_pipe", P=PIPELINE, M=microbatches, v=2)
    return np.asarray(rows.costs[:, order(rows.group_costs(0), pricer_of(program))] / _WHOLE)
