"""Programs for scripts of bash, whose calls of `schedc` and `python` run in processes that need not load torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.warm_command import run_python, run_schedc

_RUN = {"schedc": run_schedc, "python": run_python}
_ASK = """#!/usr/bin/env bash
here=${0%/*}
printf '%s\\0' "$PWD" "${0##*/}" "$@" > "$here/question"
read -r status < "$here/answer"
cat "$here/errors" >&2
cat "$here/output"
exit "$status"
"""
"""A program: hands its folder and arguments on, and prints the output that comes back."""


@contextmanager
def warm_programs(folder: Path, timeout: float = 300.0) -> Iterator[Path]:
    """The folder, with a program for each name. They run one after the other, as in a script.

    timeout: seconds of each call.
    """
    for name in ("question", "answer"):
        os.mkfifo(folder / name)
    for name in _RUN:
        (folder / name).write_text(_ASK, encoding="utf-8")
        (folder / name).chmod(0o755)
    server = threading.Thread(target=_serve, args=(folder, timeout), daemon=True)
    server.start()
    try:
        yield folder
    finally:
        (folder / "question").write_bytes(b"")
        server.join()


def _serve(folder: Path, timeout: float) -> None:
    """Answer questions until one is empty."""
    while words := (folder / "question").read_bytes().decode().split("\0")[:-1]:
        place, program, *arguments = words
        try:
            done = _RUN[program](arguments, Path(place), timeout=timeout)
            status, output, errors = done.returncode, done.stdout, done.stderr
        except Exception as error:
            status, output, errors = 1, "", f"{type(error).__name__}: {error}\n"
        (folder / "output").write_text(output, encoding="utf-8")
        (folder / "errors").write_text(errors, encoding="utf-8")
        (folder / "answer").write_text(f"{status}\n", encoding="utf-8")
