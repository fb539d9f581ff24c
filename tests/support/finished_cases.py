"""Keeps the results of finished cases in a file, so that a benchmark goes on where it was ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FinishedCases:
    """Results by the name of a case. path: a file of lines `[name, result]`; None keeps nothing beyond the process."""

    def __init__(self, path: Path | str | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._results: dict[str, Any] = {}
        if self._path is not None and self._path.is_file():
            whole = self._path.read_text(encoding="utf-8").rpartition("\n")[0]  # not a line that was cut off
            self._path.write_text(whole + "\n" * bool(whole), encoding="utf-8")
            self._results = dict(map(json.loads, whole.splitlines()))

    def result(self, name: str, run: Callable[[], Any], ended: Callable[[Any], bool] = lambda _: True) -> Any:
        """The result of a case, which ``run`` gives unless it has finished before. ended: whether a result is kept."""
        if name not in self._results:
            self._results[name] = run()
            if self._path is not None and ended(self._results[name]):
                with self._path.open("a", encoding="utf-8") as file:
                    print(json.dumps([name, self._results[name]]), file=file, flush=True)
        return self._results[name]
