"""The verdicts of benchmarks/planned.py: which plans come in another order than predicted. `test_examples` runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def planned() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        import planned  # type: ignore[import-not-found]

        yield planned
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    ("predicted", "emulated", "pairs"),
    [
        ((1.0, 1.2), (1.1, 1.0), [("0", "1")]),
        ((1.2, 1.0), (1.0, 1.1), [("1", "0")]),
        ((1.0, 1.04), (1.1, 1.0), []),
        ((1.0, 1.2), (1.0, 1.01), []),
        ((1.0, 1.03, 1.1), (1.2, 1.15, 1.16), [("0", "2")]),
    ],
)
def test_only_plans_that_differ_enough_must_keep_their_order(
    planned: ModuleType, predicted: tuple[float, ...], emulated: tuple[float, ...], pairs: list[tuple[str, str]]
) -> None:
    plans = [
        {"file": str(place), "pipeline_s": each[0], "emulated_s": each[1]}
        for place, each in enumerate(zip(predicted, emulated, strict=True))
    ]
    assert planned.swapped(plans) == pairs
