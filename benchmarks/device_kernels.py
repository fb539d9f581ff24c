"""The word `kernels` of device.py: every Triton kernel compiled for GPUs that are not here, and its numbers.

Each part runs in a process of its own: Triton decides at its first import whether it interprets.
"""

from __future__ import annotations

from typing import Any

from schedc_runtime.kernels.registry import ROWS
from support import kernel_facts, kernel_numbers
from support.kernel_facts import answer_of


def kernels() -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of compilations, comparisons and planted faults, what failed, and facts of each compilation."""
    compiled = answer_of(kernel_facts, interpreted=False)
    failed = compiled["findings"] + answer_of(kernel_numbers, interpreted=True)
    failed += [f"no case shows: {fault}" for fault in answer_of(kernel_numbers, "--faults", interpreted=True)]
    rows = [
        {"kernel": row.name, "variant": variant.name, "architecture": architecture, **facts}
        for row in ROWS
        for variant in row.variants
        for architecture, facts in compiled["table"][row.name][variant.name].items()
    ]
    compared = sum(bool(row.twin) for row in ROWS)
    return len(rows) + kernel_facts.PLANTED + compared + len(kernel_numbers.FAULTS), failed, rows
