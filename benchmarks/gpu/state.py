"""What a run of `make gpu` has measured so far, in a file: a run that was cut goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "runtime", "schedc", "schedules", "tests")
"""The folders whose files decide what a section gives."""
KINDS = {".py", ".toml", ".sched", ".lark", ".json"}


def digest_of_tree(root: Path = ROOT, folders: Iterable[str] = FOLDERS) -> str:
    """A digest of all files that a section may run."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in KINDS and path.is_file():
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class State:
    """The results by section, kept in ``path`` after each of them.

    key: what the results hold for, as tree and device. Results in the file with another key are left out.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any], *, anew: bool = False) -> None:
        self.path, self.key = path, dict(key)
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        kept = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() and not anew else {}
        if isinstance(kept, dict) and kept.get("key") == self.key:
            self.results, self.seconds = kept["results"], kept["seconds"]

    def stands(self, section: str) -> bool:
        """Whether a section needs no further run: it gave a result, or said why it cannot."""
        result = self.results.get(section)
        return result is not None and not str(result.get("result", "")).startswith("failed")

    def put(self, entries: Mapping[str, Any], section: str, seconds: float) -> None:
        """Keep the entries of a section."""
        self.results |= entries
        self.seconds[section] = round(seconds, 1)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = {"key": self.key, "seconds": self.seconds, "results": self.results}
            beside = self.path.with_suffix(".new")
            beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)
