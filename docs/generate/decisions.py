"""Keeps the decisions beside the navigation of the site, where their index lists them by title."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .write import BESIDE_THE_TREE

FOLDER = Path(__file__).resolve().parents[1] / "decisions"


def read(_app: Any, name: str, source: list[str]) -> None:
    """Change the text of a page of ``decisions/`` that Sphinx has read: `source[0]`, as its event demands."""
    if name == "decisions/index":
        source[0] = "\n\n".join([source[0].partition("```{toctree}")[0].strip(), _titles(), ""])
    elif name.startswith("decisions/0"):
        source[0] = f"{BESIDE_THE_TREE}\n\n{source[0]}"


def _titles() -> str:
    """A list of all decisions, each a link."""
    paths = sorted(FOLDER.glob("0*.md"))
    titles = (path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in paths)
    return "\n".join(f"* [{title}]({path.name})" for path, title in zip(paths, titles, strict=True))
