"""A folder of plans: written whole or not at all, and never over files that are something else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from schedc.diagnostics import Diagnostic, DiagnosticError

PLANS_JSON, PARETO, PAGE = "plans.json", "pareto.svg", "index.html"
PLAN_SUFFIX, COSTS_SUFFIX = ".sched", ".costs.toml"


_OURS = re.compile(
    r"\d+(\.sched|\.costs\.toml|\.sbatch|\.(sky|trainjob)\.yaml)|plans\.json|routing\.npz|pareto\.svg|index\.html"
)


def plan_file(place: int) -> str:
    """The name of the plan at a place from 1 on: ``01.sched``."""
    return f"{place:02}{PLAN_SUFFIX}"


def check_folder(folder: Path, forced: bool) -> None:
    """Raises `DiagnosticError` (S750) for a folder that is not to be written over.

    A folder with plans is written over if that is forced; one with other files never.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        _refuse(f"{folder} is a file, and plans are written into a folder", "name another folder")
    names = sorted(path.name for path in folder.iterdir())
    strangers = [name for name in names if not _OURS.fullmatch(name) or not (folder / name).is_file()]
    if strangers:
        _refuse(f"{folder} holds {strangers[0]}, which no search for plans has written", "name another folder")
    if names and not forced:
        _refuse(f"{folder} holds plans already", "name another folder, or write over them with --force")


def _refuse(message: str, help: str) -> None:
    raise DiagnosticError([Diagnostic("S750", message, help=help)])


def write_folder(folder: Path, forced: bool, fill: Callable[[Path], None]) -> None:
    """Lets ``fill`` write files into an empty folder, and puts it where ``folder`` is once all are written.

    Raises `DiagnosticError` (S750) as `check_folder` does. Where ``fill`` raises, ``folder`` stays as it was.
    """
    check_folder(folder, forced)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _beside(folder, "new") as new:
        new.mkdir()
        fill(new)
        check_folder(folder, forced)
        if not folder.exists():
            os.rename(new, folder)
            return
        with _beside(folder, "old") as old:
            os.rename(folder, old)
            try:
                os.rename(new, folder)
            except BaseException:
                os.rename(old, folder)
                raise


@contextmanager
def _beside(folder: Path, word: str) -> Iterator[Path]:
    """A path beside a folder, where nothing is in the end."""
    path = folder.with_name(f".{folder.name}.{word}-{os.getpid()}")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
