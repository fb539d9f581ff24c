"""Cases of `benchmarks/tensor_costs.py` for ranks of a pool, whose processes may have other paths."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from tensor_costs import (
    checked_bytes,
    counted_bytes,
    counting_stages,
    judge_bytes,
    judge_step,
    rank_of_bytes,
    rank_of_step,
)

__all__ = [
    "checked_bytes", "counted_bytes", "counting_stages", "judge_bytes", "judge_step", "rank_of_bytes", "rank_of_step",
]  # fmt: skip
