"""What ops and messages cost: scalars or one value per stage, from options, a TOML file, or the defaults."""

from __future__ import annotations

from dataclasses import dataclass

Cost = float | tuple[float, ...]
"""One value for every stage, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """Times in any one unit, per chunk (one stage), and p2p, the latency of one message between two ranks.

    B defaults to I + W and FB, an overlapped pair, to F + B: both per stage where F, I, W are.
    activation: memory that one microbatch holds on one stage from its F to its backward, in any one unit;
    pending_weight: the part of it still held between I and W (the zero-bubble papers' M_W over M_B).
    """

    F: Cost = 1.0
    I: Cost = 1.0  # noqa: E741
    W: Cost = 1.0
    B: Cost | None = None
    FB: Cost | None = None
    p2p: float = 0.0
    activation: Cost = 1.0
    pending_weight: Cost = 1.0
