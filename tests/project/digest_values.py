"""How outputs become digests (see digests.py)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import schedc

LIBRARY = Path(schedc.__file__).parent.parent / "schedules"


def anonymous(text: str) -> str:
    """A text without the paths of this checkout and of the current folder."""
    return text.replace(os.getcwd(), "HERE").replace(str(LIBRARY.parent), "ROOT")


def sha(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
