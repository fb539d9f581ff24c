"""Settings of the runtime's tests: they search shortly for the orders inside of cells."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from schedc_runtime.testing import simulated_device
from support.short_search import short_search


@pytest.fixture(autouse=True, scope="module")
def _search_shortly() -> Generator[None]:
    with short_search():
        yield


@pytest.fixture
def watched() -> Iterator[None]:
    """The test runs on a simulated device, which fails it where streams are not ordered."""
    with simulated_device():
        yield
