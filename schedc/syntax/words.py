"""Lists the names that the language itself defines: roles, placements, functions, cost symbols and metrics."""

from __future__ import annotations

from schedc.ir.ops import LETTERS

OP_LETTERS = frozenset(LETTERS)
"""Letters of the op kinds. Such a letter, alone or followed by digits, is never a name."""

ROLES = ("ranks", "microbatches", "chunks", "segments", "count")
"""Roles of a size parameter. ``segments``: number of parts into which each microbatch is cut along the sequence."""

PLACEMENTS: dict[str, tuple[int, int]] = {
    "linear": (0, 0),
    "loop": (1, 1),
    "v": (0, 0),
    "waves": (1, 1),
    "map": (1, 1),
    "pipes": (0, 1),
}
"""By placement: least and largest number of its arguments."""

BUILTINS: dict[str, tuple[int, int]] = {"min": (2, 8), "max": (2, 8), "abs": (1, 1), "ceildiv": (2, 2)}
"""By function of the language: least and largest number of its arguments."""

ORDER_WORDS = ("timed", "pair", "fill", "policy", "prefer", "cap", "at")
"""Words of computed orders that the editors explain."""

METRICS = (
    "makespan",
    "bubble",
    "span_bubble",
    "bubble_ratio",
    "span_bubble_ratio",
    "peak_activations",
    "peak_activations_between",
    "peak_pending_weight",
    "ops",
)
"""Metrics that a claim may name. Without an index, a metric of ranks is the largest over the ranks."""
