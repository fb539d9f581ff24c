"""The switch of the long sweeps: reduced in the suite, whole with ``SCHEDC_SWEEP=full`` (``make sweep``).

A test that sweeps is marked ``@pytest.mark.sweep`` and takes its range from `swept`.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def swept(full: T, reduced: T) -> T:
    """``full`` with ``SCHEDC_SWEEP=full``, ``reduced`` without it; no other value is taken for either."""
    asked = os.environ.get("SCHEDC_SWEEP", "")
    if asked not in ("", "full"):
        raise ValueError(f"SCHEDC_SWEEP is {asked!r}; set it to full, or not at all")
    return full if asked else reduced
