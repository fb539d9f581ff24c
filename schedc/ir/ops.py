"""The kinds of work a schedule orders, and the facts about each, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class OpKind(IntEnum):
    """What one op of a `Schedule` computes. The values are stored in int8 columns."""

    F = 0
    """Forward of one microbatch through one stage."""
    I = 1  # noqa: E741 - the field's letter
    """Input gradient: the backward without the weight gradients, which become pending."""
    W = 2
    """The pending weight gradients of one microbatch on one stage."""
    B = 3
    """Full backward: I, then W, in one."""
    R = 4
    """Recomputation: what F did not keep, worked out again ahead of the backward."""


@dataclass(frozen=True)
class OpFacts:
    """What analyses need to know about a kind."""

    name: str
    backward: bool
    """Consumes the gradient of the stage's output and produces that of its input."""
    weight: bool
    """Produces weight gradients; afterwards nothing of the microbatch is held on the stage."""


FACTS: dict[OpKind, OpFacts] = {
    OpKind.F: OpFacts("forward", backward=False, weight=False),
    OpKind.I: OpFacts("input gradient", backward=True, weight=False),
    OpKind.W: OpFacts("weight gradient", backward=False, weight=True),
    OpKind.B: OpFacts("full backward", backward=True, weight=True),
    OpKind.R: OpFacts("recomputation", backward=False, weight=False),
}

BACKWARD = np.array([FACTS[kind].backward for kind in OpKind])
"""Whether a kind is a backward, indexed by its value."""

TURN = np.array([0, 1, 2, 1, 3])
"""Turn of each kind, indexed by its value: forward, backward (B or I), weight gradients, recomputation. On a stage a
microbatch has each at most once."""

LETTERS = "".join(kind.name for kind in OpKind)
"""Letter of each kind, indexed by its value."""
