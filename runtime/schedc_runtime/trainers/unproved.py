"""Goes back behind the last proved step: states that a faulty device may have spoilt are not used again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from schedc_runtime.keeper.images import Image
from schedc_runtime.trainers.kept_states import set_aside

MARK = "proved-until"
"""File of a run with the number of the newest state that may be used. The next resumption removes it."""


def proved_state(step: int, calls: int, proved: int, accumulate: int) -> int:
    """The newest state, by its number of updates, that no step behind the last proved one has changed.

    step: updates so far. calls: training steps until that state. proved: training steps up to the last proved one.
    accumulate: training steps of an update.
    """
    return max(0, step - max(0, -(-(calls - proved) // accumulate)))


def drop_unproved(images: Iterable[Image], step: int) -> None:
    """Drop the states behind ``step`` from this rank's memory."""
    for image in images:
        header = image.header()
        if header is not None and header.step > step:
            image.clear()


def mark_unproved(root: Path, step: int, attempt: str) -> None:
    """Set aside the states behind ``step`` on disk, also those that the keeper commits until the next resumption."""
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f"{MARK}.part"
    partial.write_text(f"{step}\n")
    os.replace(partial, root / MARK)
    set_aside(root, step, f"{attempt}-unproved")


def newest_allowed(root: Path) -> int | None:
    """The newest state that may be used, by the mark of an earlier attempt; None where all may be."""
    path = root / MARK
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def obey_mark(root: Path, attempt: str) -> list[str]:
    """Obey the mark of an earlier attempt before a run goes on. Returns a line for people where there is one."""
    path = root / MARK
    if not path.is_file():
        return []
    text = path.read_text().strip()
    if text.isdecimal():
        set_aside(root, int(text), f"{attempt}-unproved")
    path.unlink()
    return [f"states behind step {int(text):,}: a device that computes wrongly may have spoilt them"] * text.isdecimal()
