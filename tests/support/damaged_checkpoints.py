"""Damages a committed checkpoint in every way of disks and people, and looks whether each damage is found."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import COMMIT, PIECE, step_folder
from schedc_runtime.saved.read import Newest, newest
from schedc_runtime.saved.safetensors import spans_in
from support.saved_cases import assert_step, save

MORE = 5 * PIECE // 16
"""Numbers that a rank holds besides, so that its file has two pieces."""


def flips(bits: int = 1000, cuts: int = 200, more: int = MORE) -> dict[str, Any]:
    """Damages a step in each way. Returns the number of cases, those that were not found, and counts."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        root.mkdir()
        for step in (1, 2):
            save(root, step, more=more)
        cases = 0
        for name, wanted, restore in _damages(root, bits, cuts):
            with restore:
                told = newest(root)
                if why := _wrong(told, step_folder(root, 2), wanted):
                    failures.append(f"{name}: {why}")
            cases += 1
        if newest(root).left_out:
            failures.append("the undamaged step is not taken")
        assert_step(root, 2)
    found = {"found": cases - len(failures), "flips": bits, "truncations": cuts}
    return {"cases": cases, "failed": len(failures), **found, "failures": failures}


def _wrong(told: Newest, folder: Path, wanted: str) -> str:
    """What is wrong with the answer. wanted: what it must say of the step in ``folder``, as a pattern."""
    if told.step is None or told.step.step != 1 or [step for step, _ in told.left_out] != [2]:
        return "the step before is not taken"
    with suppress(MaterializeError):
        open_checkpoint(folder)
        return "the step loads" if (folder / COMMIT).is_file() else ""
    why = told.left_out[0][1]
    return "" if str(folder) in why and re.search(wanted, why) else f"it says: {why}"


def _damages(root: Path, bits: int, cuts: int) -> Iterator[tuple[str, str, Any]]:
    """The damages of step 2: name, pattern of the message, and context in which the damage is there."""
    draw = random.Random(7)
    folder = step_folder(root, 2)
    files = sorted(folder.iterdir())
    for case in range(bits):
        path = files[case % len(files)]
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        wanted = _place(path, place)
        content[place] ^= 1 << draw.randrange(8)
        yield f"bit {place} of {path.name}", wanted, _replaced({path: bytes(content)})
    for case in range(cuts):
        path = files[case % len(files)]
        content = bytearray(path.read_bytes())
        kept = draw.randrange(len(content))
        yield f"{path.name} cut to {kept} bytes", re.escape(path.name), _replaced({path: bytes(content[:kept])})
    contents = {path: path.read_bytes() for path in files}
    for one, other in permutations([path for path in files if path.name != COMMIT], 2):
        if one.suffix == other.suffix:
            yield f"{one.name} in place of {other.name}", re.escape(other.name), _replaced({other: contents[one]})
        both = {one: contents[other], other: contents[one]}
        yield f"{one.name} and {other.name} swapped", r"rank-000\d", _replaced(both)
    for path in files:
        older = step_folder(root, 1) / path.name
        name = re.escape(path.name)
        yield f"{path.name} of step 1", name, _replaced({path: older.read_bytes()})
        if path.name != COMMIT:
            yield f"{path.name} lost", name, _replaced({path: None})


def _place(path: Path, place: int) -> str:
    """A pattern of what must be told of a changed byte: its file, and behind the header its piece and tensor."""
    if path.suffix != ".safetensors":
        return re.escape(path.name)
    spans = spans_in(path)
    begin = min(span.begin for span in spans.values())
    if place < begin:
        return re.escape(path.name)
    return rf"{re.escape(path.name)}, 4 MiB piece {place // PIECE}: a byte has changed since it was written \(in it `"


@contextmanager
def _replaced(contents: dict[Path, bytes | None]) -> Iterator[None]:
    """Files with other contents, or without; as before behind the block."""
    kept = {path: path.read_bytes() for path in contents}
    for path, content in contents.items():
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    try:
        yield
    finally:
        for path, before in kept.items():
            path.write_bytes(before)
