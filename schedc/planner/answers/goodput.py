"""The share of time that makes progress when devices fail: checkpoints, lost work and restarts.

Failures of all devices come at random, with an exponential distribution. After a failure a restart follows, which may
fail too, and then all steps since the last checkpoint run again.
"""

from __future__ import annotations

from math import exp, expm1, sqrt
from typing import NamedTuple

_RARE = 0.01
"""Young's interval is taken up to this share of the mean time between failures."""


class Failures(NamedTuple):
    """How a cluster fails. mtbf_s: mean seconds between failures of the whole cluster.

    checkpoint_s: seconds that training stands still for a checkpoint. restart_s: from a failure to the first step.
    """

    mtbf_s: float
    checkpoint_s: float
    restart_s: float


def checkpoint_interval(failures: Failures) -> float:
    """Seconds of training between two checkpoints, without the checkpoint itself.

    Young's interval, the root of 2 C M (Communications of the ACM 17(9), 1974). Where this is above 1 % of M, Daly's
    (Future Generation Computer Systems 22(3), 2006, equation 37): M is the mean time between failures, and C the time
    of a checkpoint.
    """
    mtbf, checkpoint = failures.mtbf_s, failures.checkpoint_s
    young = sqrt(2 * checkpoint * mtbf)
    if young <= _RARE * mtbf:
        return young
    share = checkpoint / (2 * mtbf)
    return mtbf if share >= 1 else young * (1 + sqrt(share) / 3 + share / 9) - checkpoint


def goodput(failures: Failures, interval_s: float) -> float:
    """Share of the time in which steps make progress, with a checkpoint after each ``interval_s`` seconds of training.

    The expected time of an interval is M exp(R / M) (exp((interval + C) / M) - 1), with R for a restart (Daly, equation
    20).
    """
    mtbf = failures.mtbf_s
    expected = mtbf * exp(failures.restart_s / mtbf) * expm1((interval_s + failures.checkpoint_s) / mtbf)
    return interval_s / expected
