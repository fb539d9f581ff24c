"""Opens the built playground in a browser, and compares it with this process."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from contextlib import chdir
from pathlib import Path
from time import perf_counter
from typing import Any

from playground.answers import answer

from schedc.load.library import load, names
from support.chromium import Browser
from support.needs import PLAYGROUND
from support.paths import ROOT
from support.served import served

DRAWN = "document.body?.dataset.round === '1'"
MOST_BYTES, MOST_SECONDS = 12e6, 5.0
_ON_DEMAND = ("formulas.zip", "later.zip", "offline.js")
"""Files that the first drawing does not need."""


def asked(do: str, text: str = "", **more: Any) -> dict[str, Any]:
    """What this process answers a request of the page."""
    return dict(json.loads(answer(json.dumps(request_of(do, text, **more)))))


def request_of(do: str, text: str, **more: Any) -> dict[str, Any]:
    return {"do": do, "text": text, "form": "sched", "name": "", "schedule": "", "sizes": {}, "costs": {}} | more


def unequal(browser: Browser) -> list[str]:
    """The schedules of the library whose facts or drawing in the browser are not those of this process."""
    wrong = []
    for name in names():
        request = json.dumps(request_of("draw", load(name).text, name=name))
        drawn = browser.result(f"playground.ask({request})")
        if not drawn["svg"] or drawn != asked("draw", load(name).text, name=name):
            wrong.append(name)
    return wrong


def foreign(browser: Browser, address: str) -> list[str]:
    """Requests of the page to other hosts, and its faults."""
    return [url for url in browser.urls if not url.startswith((address, "about:", "blob:", "data:"))] + browser.faults


def transferred() -> int:
    """Bytes before the first drawing, as a server sends them that compresses."""
    files = [path for path in PLAYGROUND.rglob("*") if path.is_file() and path.name not in _ON_DEMAND]
    return sum(len(gzip.compress(path.read_bytes(), 9)) for path in files)


def playground() -> dict[str, Any]:
    """The word of `benchmarks/door.py`: builds the page anew, and opens it three times."""
    subprocess.run(["make", "playground"], cwd=ROOT, check=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        served(PLAYGROUND) as address,
        Browser(Path(folder) / "profile") as browser,
    ):
        first, *again = (_seconds(browser, address) for _ in range(3))
        wrong, others = unequal(browser), foreign(browser, address)
    size = transferred()
    late = [each for each in (size > MOST_BYTES and "bytes", min(again) > MOST_SECONDS and "time") if each]
    return {"cases": len(names()), "failed": len(wrong) + len(others) + len(late), "wrong": wrong, "foreign": others,
            "bytes": size, "first_s": round(first, 2), "again_s": round(min(again), 2), "late": late,
            "processors": os.cpu_count()}  # fmt: skip


def _seconds(browser: Browser, address: str) -> float:
    """Wall time until the first drawing."""
    begin = perf_counter()
    browser.visit(address, DRAWN)
    return perf_counter() - begin
