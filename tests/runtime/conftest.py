"""Settings of the runtime's tests: they search shortly for the orders inside of cells."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.short_search import short_search


@pytest.fixture(autouse=True, scope="module")
def _search_shortly() -> Generator[None]:
    with short_search():
        yield
