"""Finds the modules that a first drawing does not need: their archive is unpacked at the first import of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.resources import files

NAMES = "later.txt"
"""The file beside this one with the names of these modules, a line each. `pack.py` writes it."""


class LaterFinder:
    """Asked behind all other finders. unpack: unpacks the archive, and is called once."""

    def __init__(self, names: frozenset[str], unpack: Callable[[], None]) -> None:
        self.names, self.unpack = names, unpack

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        sys.meta_path.remove(self)
        self.unpack()
        invalidate_caches()
        return PathFinder.find_spec(name, path)


def find_later(unpack: Callable[[], None]) -> None:
    """Imports from here on find the modules of the archive."""
    names = files("playground").joinpath(NAMES).read_text(encoding="utf-8")
    sys.meta_path.append(LaterFinder(frozenset(names.split()), unpack))
