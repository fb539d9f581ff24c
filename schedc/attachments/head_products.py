"""What a head costs by the form of its loss: products in each op, and bytes that a microbatch holds for it."""

from __future__ import annotations

from typing import NamedTuple

from schedc.ir.plan import Plan, bytes_per_number

_WIDE = 4
"""Bytes of a number in which losses are formed."""


class HeadProducts(NamedTuple):
    """How often an op computes each product of the head: logits, gradient of the input, gradient of the weight."""

    F: tuple[int, int, int]
    I: tuple[int, int, int]  # noqa: E741
    W: tuple[int, int, int]
    B: tuple[int, int, int]


PRODUCTS = {
    "whole": HeadProducts((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)),
    "early": HeadProducts((1, 1, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    "again": HeadProducts((1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)),
}
"""By the form of the loss."""


def held_bytes(plan: Plan, form: str) -> int | None:
    """Bytes of head and loss that a microbatch holds from F to its backward; None where the plan says too little.

    They are the hidden states; whole, the logits' log-probabilities; again, a log-sum of each row.
    """
    vocab = plan.loss.vocab if plan.loss else 0
    if not plan.tokens or not plan.hidden or (form == "whole" and not vocab):
        return None
    row = plan.hidden * bytes_per_number(plan.dtype)
    return plan.tokens * (row + _WIDE * {"whole": vocab, "early": 0, "again": 1}[form])
