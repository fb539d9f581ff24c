"""Rows of training data that cost unequally: costs, deals to replicas, orders in the pipeline, and a loader."""

from __future__ import annotations

from schedc_runtime.data.choices import ProgramChoices, StepChoice
from schedc_runtime.data.dealt import Deal, deal, pricer_of
from schedc_runtime.data.dealt import order_rows as order
from schedc_runtime.data.documents import (
    cumulative_lengths,
    document_mask,
    document_positions,
    next_tokens,
    packed_inputs,
    thd_inputs,
    transformers_inputs,
)
from schedc_runtime.data.lengths import Lengths
from schedc_runtime.data.loader import DealtStep, RowLoader
from schedc_runtime.data.row_costs import RowCosts
from schedc_runtime.data.windows import Windows

__all__ = [
    "Deal",
    "DealtStep",
    "Lengths",
    "ProgramChoices",
    "RowCosts",
    "RowLoader",
    "StepChoice",
    "Windows",
    "cumulative_lengths",
    "deal",
    "document_mask",
    "document_positions",
    "next_tokens",
    "order",
    "packed_inputs",
    "pricer_of",
    "thd_inputs",
    "transformers_inputs",
]
