"""Packages with providers, installed for a test: their metadata lie in a folder of the path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path

import pytest

from schedc_runtime import providers
from schedc_runtime.moe.products import provider_for


@contextmanager
def installed(folder: Path, packages: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """packages: objects ``module:name`` of the entry points, by name, by package."""
    for package, points in packages.items():
        metadata = folder / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{providers.GROUP}]", *lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        _forget()
        yield
    _forget()


def _forget() -> None:
    invalidate_caches()
    providers._points.cache_clear()
    provider_for.cache_clear()
