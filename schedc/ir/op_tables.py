"""The facts of op kinds (`schedc.ir.ops.FACTS`) as arrays, indexed by a kind's value: what whole columns are asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedc.ir.ops import FACTS, PAIR_NAMES, OpKind, pair_number

BACKWARD = np.array([FACTS[kind].backward for kind in OpKind])
"""[kinds] whether a kind is a backward, indexed by its value."""

WEIGHT = np.array([FACTS[kind].weight for kind in OpKind])
"""[kinds] whether a kind produces weight gradients, indexed by its value."""

TURN = np.array([FACTS[kind].turn for kind in OpKind])
"""[kinds] turn of each kind, indexed by its value: forward, backward (B or I), weight gradients, recomputation."""

PAIRS = np.array([[second.name in FACTS[first].pairs_with for second in OpKind] for first in OpKind])
"""[kinds, kinds] whether an op of the first kind may overlap one of the second, indexed by their values."""

PAIR_NUMBERS = np.array([pair_number(OpKind[name[0]], OpKind[name[1]]) for name in PAIR_NAMES])
"""[pairs] the numbers of the kinds of overlapped pairs."""


def kinds_where(facts: npt.NDArray[np.bool_]) -> list[OpKind]:
    """The kinds for which an array such as `BACKWARD`, [kinds], is true."""
    return [OpKind(value) for value in np.flatnonzero(facts).tolist()]
