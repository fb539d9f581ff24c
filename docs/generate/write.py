"""Writes generated pages below `docs/reference`, touches only what changed, and removes what is no longer made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

BESIDE_THE_TREE = "---\norphan: true\n---"
"""Begins a page that only an index lists. In the navigation a hundred of them would take half the time of a build."""


def write(folder: Path, pages: Mapping[str, str]) -> None:
    """Bring ``folder`` to exactly these files: name and text."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def contents(names: list[str]) -> str:
    """A hidden table of contents, in this order."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```", ""])


def fence(text: str, language: str) -> str:
    """A block of code; what the lexer of the language refuses is shown all the same."""
    return f"```{{code-block}} {language}\n:force:\n\n{text.strip()}\n```"
