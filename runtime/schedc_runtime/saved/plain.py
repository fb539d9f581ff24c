"""Reads JSON that is not trusted, and says what cannot be read of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schedc_runtime.errors import MaterializeError

FORMS = "a .safetensors or torch.save file, its .index.json, a directory with these, a DCP directory, or a run's folder"


def refused(path: Path | str, why: object, name: str = "") -> MaterializeError:
    """The error for the file ``path``, or for its tensor ``name``."""
    what = f"{path}: `{name}`" if name else str(path)
    return MaterializeError(
        f"{what} cannot be read: {str(why)[:400]}", f"write the checkpoint again; known are {FORMS}"
    )


def json_of(text: str) -> Any:
    """The value of a JSON text.

    Raises `ValueError` for NaN, for infinities, and for an object that has a name twice or a text that is no UTF-8.
    """
    return json.loads(text, object_pairs_hook=_table, parse_constant=_no_number)


def sizes(value: Any) -> list[int] | None:
    """``value`` if it is a list of sizes, each an integer of at most 63 bits."""
    valid = isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)
    return value if valid else None


def unique(pairs: Iterable[tuple[Any, Any]], filled: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """``filled``, or a new dict, with ``pairs``. Raises `ValueError` for a name that is there twice."""
    filled = {} if filled is None else filled
    for key, value in pairs:
        if key in filled:
            raise ValueError(f"`{key}` is there twice")
        filled[key] = value
    return filled


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        text.encode("utf-8")
    return unique(pairs)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")
