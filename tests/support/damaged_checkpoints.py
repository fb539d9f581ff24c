"""Damages a committed checkpoint in every way of disks and people, and looks whether each damage is found.

It is looked for twice: by what reads a whole step, and by `Checkpoints.resume` of two ranks, which compares the bytes
that each of them loads.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from io import StringIO
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import COMMIT, PIECE, step_folder
from schedc_runtime.saved.read import Newest, newest
from schedc_runtime.saved.safetensors import spans_in
from schedc_runtime.testing import pool
from support.kept_runs import Run
from support.saved_cases import assert_step, save

MORE = 5 * PIECE // 16
"""Numbers that a rank holds besides, so that its file has two pieces."""


def flips(bits: int = 1000, cuts: int = 200, more: int = MORE, every: int = 2) -> dict[str, Any]:
    """Damages steps in each way. Returns the number of cases, those that were not found, and counts.

    every: one of so many damages is also given to runs that go on.
    """
    cases, failures = _read_whole(bits, cuts, more)
    with tempfile.TemporaryDirectory() as folder:
        answers = pool(2).run(f"{__name__}:resumed", folder=folder, bits=bits, cuts=cuts, every=every, timeout=600.0)
    resumed = answers[0][0]
    failures += [failure for _, each in answers for failure in each]
    cases += resumed
    found = {"found": cases - len(failures), "flips": bits, "truncations": cuts, "resumed": resumed}
    return {"cases": cases, "failed": len(failures), **found, "failures": failures}


def _read_whole(bits: int, cuts: int, more: int) -> tuple[int, list[str]]:
    """Number of cases, and failures, where all bytes of a step are read."""
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
    return cases, failures


def resumed(rank: int, world_size: int, folder: str, bits: int, cuts: int, every: int) -> tuple[int, list[str]]:
    """Number of cases, and failures, where two ranks go on from a damaged step. Each goes on from the step before."""
    root = Path(folder, "run")
    run = Run(root, "1f1b", world_size, in_process=False, durable=1, copy="now")
    run.train(1)
    before = _bits(run)
    run.train(2)
    run.saved.close()
    run.pipe.close()
    run = Run(root, "1f1b", world_size, in_process=False, durable=1, copy="now")
    control = run.pipe.control
    failures, cases, damages = list[str](), 0, iter(list[tuple[str, str, Any]]())
    if rank == 0:
        damages = islice(_damages(root, bits, cuts), 0, None, every)
    while True:
        name, wanted, damage = next(damages, ("", "", nullcontext()))
        if not control.gather("a case", name)[0]:
            break
        with damage:
            control.gather("damaged", None)
            with redirect_stdout(StringIO()) as printed:
                step = run.saved.resume()
            if rank == 0:
                _put_back(root)
        lines = [line for line in printed.getvalue().splitlines() if "left out: step 2 on disk: " in line]
        right = rank or (len(lines) == 1 and str(step_folder(root, 2)) in lines[0] and re.search(wanted, lines[0]))
        if step != 1 or _bits(run) != before or not right:
            failures.append(f"{name}: resumed at step {step}, and printed {printed.getvalue()}")
        cases += 1
    if run.saved.resume() != 2:
        failures.append("the undamaged step is not resumed from")
    run.saved.close()
    run.pipe.close()
    return cases, failures


def _bits(run: Run) -> list[bytes]:
    """All bytes of the model and its moments on this rank."""
    moments = [value for own in run.optimizer.state_dict()["state"].values() for value in own.values()]
    return [value.numpy().tobytes() for value in [*run.pipe.state_dict().values(), *moments]]


def _put_back(root: Path) -> None:
    """Rename step 2 back: a resumption has set it aside."""
    for path in root.glob("left-out-*"):
        (path / f"{COMMIT}.left-out").rename(path / COMMIT)
        path.rename(step_folder(root, 2))


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
