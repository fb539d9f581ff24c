"""The files of the shipped models and clusters, as tables. Nothing else of the planner is loaded for a list of them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def files(kind: str) -> dict[str, Path]:
    """The shipped files of a kind, "models" or "clusters", by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / kind).glob("*.toml"))}


def tables(kind: str) -> dict[str, dict[str, Any]]:
    """The tables in these files, by name."""
    return {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in files(kind).items()}
