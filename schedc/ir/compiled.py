"""Loops that numba compiles, where it is installed and there is work enough: when to load them, and how."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

IMPORT_SECONDS = 0.4
"""What importing numba and loading compiled loops costs: less work than this is left to the other way."""

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit() -> Callable[[Callable[..., Any]], Any] | None:
    """What compiles a loop, each once; None without numba. Machine code stays on disk where a folder can be written."""
    try:
        import numba
    except ImportError:
        return None

    @cache
    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # nowhere to keep it
            return numba.njit(nogil=True)(function)

    return compiled


def called_from_loops(function: Loop) -> Loop:
    """The function itself, which compiled loops may call from now on. numba must be there."""
    from numba.extending import register_jitable

    register_jitable(function)
    return function


def compile_seconds(source: Path, new: float) -> float:
    """What the loops of a file still have to be compiled for: nothing, if machine code of it is on disk, else ``new``.

    Where numba keeps it elsewhere, because this folder cannot be written, it is taken to be there.
    new: seconds to compile all loops.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else source.parent / "__pycache__"
    if not chosen and not os.access(folder if folder.exists() else source.parent, os.W_OK):
        return 0.0
    newest = max((file.stat().st_mtime for file in folder.glob(f"**/{source.stem}.*.nbi")), default=0.0)
    return 0.0 if newest >= source.stat().st_mtime else new
