"""A browser in which tests open pages, started once for all files of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import chromium
from support.chromium import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not chromium.PATH:
        pytest.skip("needs chromium, google-chrome or chromium-browser on the PATH")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
