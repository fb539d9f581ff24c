"""The switch of the long sweeps: reduced in the suite, whole with ``SCHEDC_SWEEP=full`` (``make sweep``).

A test that sweeps is marked ``@pytest.mark.sweep`` and takes its range from `swept`. A long test whose mechanism has
a shorter one is marked `in_sweeps`, and the suite leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def swept(full: T, reduced: T) -> T:
    """``full`` with ``SCHEDC_SWEEP=full``, ``reduced`` without it; no other value is taken for either."""
    asked = os.environ.get("SCHEDC_SWEEP", "")
    if asked not in ("", "full"):
        raise ValueError(f"SCHEDC_SWEEP is {asked!r}; set it to full, or not at all")
    return full if asked else reduced


def halved(cases: Iterable[T]) -> list[T]:
    """All of ``cases`` in sweeps, and every second one in the suite."""
    return thinned(cases, 2)


def thinned(cases: Iterable[T], every: int) -> list[T]:
    """All of ``cases`` in sweeps, and the first of each ``every`` cases in the suite."""
    all_of_them = [*cases]
    return swept(all_of_them, all_of_them[::every])


def in_sweeps(*kept: str) -> pytest.MarkDecorator:
    """Let a test run in sweeps alone.

    kept: tests of the suite with the same mechanism. A name alone is of the same file; a test of another file is
    ``runtime/moe/test_hot.py::NAME``.
    """
    return pytest.mark.sweep(*kept)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take those that run in sweeps alone from ``items``; none with ``SCHEDC_SWEEP=full``."""
    alone = {item for item in items if any(mark.args for mark in item.iter_markers("sweep"))}
    config.hook.pytest_deselected(items=swept([], [*alone]))
    items[:] = swept(items, [item for item in items if item not in alone])
