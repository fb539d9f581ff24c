"""Codes of family S6: other tools' formats, written and read."""

from __future__ import annotations

from schedc.codes.base import Code

S6: tuple[Code, ...] = (
    Code(
        "S601",
        "not an op of torch's schedule CSV",
        "A schedule CSV has one line per rank and, between commas, ops such as 0F3, 5I2, 5W2, 2B1, or an overlapped "
        "pair (3F4;2B1)OVERLAP_F_B: stage, letter, microbatch, both numbers from 0. Only the compute level is read; "
        "a lowered file with SEND_F and RECV_F says nothing that the compute level does not. Raised when such a file "
        "is imported.",
    ),
    Code(
        "S602",
        "a schedule CSV does not say where each stage lives",
        "The CSV format names no placement. It follows from the forwards: stage s of microbatch m lives on the rank "
        "that runs its forward. If a forward is missing, its place is unknown. Raised when such a file is imported "
        "without a placement.",
    ),
)
