"""A browser in which tests open pages, started once for all files of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.chromium import Browser
from support.needs import lacking


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if reason := lacking("chromium"):
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
