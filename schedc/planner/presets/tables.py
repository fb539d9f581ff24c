"""The files of the shipped models, clusters and fits, as tables. A list of them loads nothing else of the planner."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DEFAULT_STACK = "mbridge_26_04_01"
"""The shipped fit whose stack trains on every shipped cluster, unless another one is asked for."""


def files(kind: str) -> dict[str, Path]:
    """The shipped files of a kind, "models", "clusters" or "fits", by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / kind).glob("*.toml"))}


def tables(kind: str) -> dict[str, dict[str, Any]]:
    """The tables in these files, by name."""
    return {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in files(kind).items()}
