"""The names that the language itself defines: roles, placements, functions, cost symbols and metrics."""

from __future__ import annotations

from schedc.ir.ops import LETTERS

OP_LETTERS = frozenset(LETTERS)
"""The op kinds; such a letter, alone or followed by digits, is never a name."""

ROLES = ("ranks", "microbatches", "chunks", "segments", "count")
"""What a size parameter may be. ``segments``: the parts of each microbatch along the sequence, numbered one by one."""

PLACEMENTS: dict[str, tuple[int, int]] = {
    "linear": (0, 0),
    "loop": (1, 1),
    "v": (0, 0),
    "waves": (1, 1),
    "map": (1, 1),
    "pipes": (0, 1),
}
"""Each placement with the least and the largest number of its arguments."""

BUILTINS: dict[str, tuple[int, int]] = {"min": (2, 8), "max": (2, 8), "abs": (1, 1), "ceildiv": (2, 2)}
"""Each function of the language with the least and the largest number of its arguments."""

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
"""What a claim may speak of; without an index the largest over the ranks."""
