"""Traces from strangers: altered events, sizes, times and names of a step, and files that are none."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from schedc.cli import main
from support.paths import ROOT
from support.synthetic_traces import World, by_rank, schedule_at, write_steps

FOLDER = "traces"
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -1e308, 10**40, 1 << 63, float("nan"), float("inf"), "", "x", "\0", [], [[1]], {"ts": {}},
    "\x1b[2J", "<script>alert(1)</script>", "../outside", "/etc/passwd",
)  # fmt: skip
NAMES = (
    "999999999F999999999", "0F999999999", "999999999F0", "PP:0F3", "PP:999999999F0", "Forward 999999999", "Backward 0",
    "(0F0;0F0)OVERLAP_F_B", "(1F3;9B9)OVERLAP_F_B part", "0SEND_F0 + 0RECV_B0", "1WAIT_RECV_F999999999", "0F0 \x1b[2J",
)  # fmt: skip
Document = dict[str, Any]


@cache
def _torch() -> dict[str, Document]:
    """Files of two ranks of torch, by name, cut to the events that a diagnosis reads."""
    folder = ROOT / "examples" / "traces" / "slow_rank"
    found = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.iterdir())}
    for document in found.values():
        del document["traceEvents"][400:]
    return {name.removesuffix(".gz"): document for name, document in found.items()}


def _own(folder: Path, draw: random.Random) -> dict[str, Document]:
    """Files of one or two steps of our runtime, by name: of all ranks or of one."""
    known = schedule_at(draw.choice(("1f1b", "zbv")), P=2, M=4)
    paths = write_steps(folder, known, World(), steps=draw.choice((1, 2)))
    found = {path.name: json.loads(path.read_text()) for path in paths}
    if draw.random() < 0.5:
        return found
    for path in paths:
        path.unlink()
    return by_rank(found.values())


def write_hostile_trace(
    folder: Path, draw: random.Random, altered: Callable[[Any, random.Random], tuple[Any, str]],
    text: Callable[[Any], str],
) -> str:  # fmt: skip
    """Writes altered files of one run into ``folder/traces``, and returns what was done. altered: changes a JSON value
    at one place. text: JSON of any depth."""
    place = folder / FOLDER
    place.mkdir()
    found = _own(place, draw) if draw.random() < 0.6 else copy.deepcopy(_torch())
    name = draw.choice(list(found))
    kind = draw.choice(("any place", "events", "events", "facts", "bytes", "files", "steps"))
    told = ""
    if kind == "any place":
        found[name], told = altered(found[name], draw)
    elif kind == "events":
        for event in draw.choices(found[name]["traceEvents"], k=draw.choice((1, 1, 1, 20))):
            key = draw.choice([*event, "args", "pid"])
            event[key] = draw.choice(NAMES if key == "name" and draw.random() < 0.8 else VALUES)
            told = f"{key} = {event[key]!r}"
    elif kind == "facts":
        key = draw.choice(("otherData", "distributedInfo", "baseTimeNanoseconds", "traceEvents"))
        value = draw.choice((*VALUES, {"schedule": draw.choice(VALUES)}, {"rank": draw.choice(VALUES)}))
        if key == "otherData" and draw.random() < 0.7:
            names = ("rank", "ranks", "replica", "step", "program", "schedule")
            value = found[name].get(key, {}) | {draw.choice(names): draw.choice(VALUES)}
        found[name][key], told = value, f"{key} = {value!r}"
    elif kind == "steps":
        for event in found[name]["traceEvents"]:
            event["args"] = {
                "step": draw.choice((0, 0, 1, 1 << 19, -1, 1 << 40, "1")),
                "off core us": draw.choice(VALUES),
            }
    for each, document in found.items():
        (place / each).write_text(text(document))
    if kind in ("bytes", "files"):
        told = spoil(place / name, draw)
    return f"{kind} {told}"


def spoil(path: Path, draw: random.Random) -> str:
    """Gives a file other bytes, or puts what is no file in its place."""
    kind = draw.choice(("flips", "cut", "gzip", "link", "pipe", "folder", "loop"))
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flips":
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
    if kind in ("flips", "cut"):
        path.write_bytes(content[: draw.randrange(len(content))] if kind == "cut" else content)
    elif kind == "gzip":
        packed = gzip.compress(bytes(content))
        path.write_bytes(packed[: draw.randrange(2, len(packed))])
    elif kind == "link":
        path.symlink_to(path.parent.parent.parent / "outside" / "secret.safetensors")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name)
    return kind


def read_hostile_trace(folder: Path) -> str:
    """``refused`` or ``read``; or what went wrong. Reads the folder as text, as JSON and with questions."""
    outcome = "read"
    questions = ["--what-if", "rank 1 = others", "--what-if", "communication = 0"]
    for options in ([], ["--json", *questions]):
        result = CliRunner().invoke(main, ["diagnose", str(folder / FOLDER), *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return f"{type(result.exception).__name__}: {result.exception}"[:200]
        if result.exit_code not in (0, 2, 3) or "\x1b" in result.output:
            return f"diagnose {options}: status {result.exit_code}, or a terminal is driven"
        outcome = "refused" if result.exit_code == 2 else outcome
    return outcome
