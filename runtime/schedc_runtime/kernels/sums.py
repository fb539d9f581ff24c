"""Adds gradients to those that parameters have: one launch for all parameters of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation


def sums_twin(totals: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
    """Add each of ``summands`` [...] to its total [...], rounded once to the total's dtype."""
    torch._foreach_add_(list(totals), list(summands))


add_gradients = operation(
    "add_gradients(Tensor(a!)[] totals, Tensor[] summands) -> ()",
    sums_twin,
    "sums:launch_sums",
    lambda totals, summands: None,
)
