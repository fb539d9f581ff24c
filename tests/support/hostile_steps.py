"""Files of last steps from strangers: altered headers, streams, slots and notes, and what is no file."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.speed.ring import RunStream, StepRing, write_traces
from support.hostile_traces import FOLDER, read_hostile_trace, spoil
from support.synthetic_traces import World, schedule_at, write_steps

KEPT = "last-steps"
PAGE, STREAMS = 4096, 1 << 18
"""Where the streams of a file begin, and their bytes."""
WORDS = (-1, 0, 1, 2, 3, 31, 64, 1 << 31, (1 << 63) - 1, -(1 << 63))


@cache
def _events(rank: int) -> tuple[RunStream, list[int]]:
    """The stream of a rank in a step of known times, and the ns at which each of its instructions ends."""
    with TemporaryDirectory() as place:
        (path,) = write_steps(Path(place), schedule_at("1f1b", P=2, M=2), World(), steps=1)
        document = json.loads(path.read_text())
    events = sorted((each for each in document["traceEvents"] if each["pid"] == rank), key=lambda each: each["ts"])
    ends = [round(1000 * (each["ts"] + each["dur"])) for each in events]
    names = [each["name"] for each in events]
    return RunStream(document["otherData"]["schedule"], names, [each["tid"] == 0 for each in events]), ends


@cache
def _start() -> int:
    """The ns of the clock at which the steps of all ranks begin, later than their first look at it."""
    return time.perf_counter_ns()


def _slot() -> int:
    """Bytes of a step in a file whose notes take 64 bytes."""
    return 8 * 8 + 64 + 16 * max(len(_events(rank)[0].names) for rank in (0, 1))


def _write(path: Path, rank: int) -> None:
    stream, ends = _events(rank)
    ring = StepRing(path, note=64)
    for step in (1, 2):
        times = ring.begin(step, stream)
        for place, end in enumerate(ends):
            times.spent[place], times.ended[place] = 10, _start() + 10**9 * step + end
        ring.end({"collections": step})
    ring.close()


def write_hostile_steps(
    folder: Path, draw: random.Random, altered: Callable[[Any, random.Random], tuple[Any, str]],
    text: Callable[[Any], str],
) -> str:  # fmt: skip
    """Writes files of two ranks into ``folder/last-steps``, one of them altered, and returns what was done."""
    place = folder / KEPT
    place.mkdir()
    for rank in (0, 1):
        _write(place / f"rank-{rank:04}.times", rank)
    path = place / f"rank-{draw.randrange(2):04}.times"
    content = bytearray(path.read_bytes())
    kind = draw.choice(("header", "streams", "streams", "slot", "note", "deep", "name", "file"))
    told = ""
    if kind == "header":
        at = draw.choice((0, 8, 12, 16, 24))
        content[at : at + 8] = struct.pack("<q", draw.choice(WORDS))
        told = str(at)
    elif kind in ("streams", "deep"):
        streams, told = altered([[*copy.deepcopy(_events(0)[0])]], draw)
        packed = ("[" * 100_000 if kind == "deep" else text(streams)).encode("utf-8", "surrogatepass")[:STREAMS]
        content[PAGE : PAGE + len(packed)] = packed
        content[24:32] = struct.pack("<Q", len(packed))
    elif kind == "slot":
        at = PAGE + STREAMS + _slot() * draw.choice((1, 2)) + 8 * draw.randrange(8)
        content[at : at + 8] = struct.pack("<q", draw.choice(WORDS))
        told = str(at)
    elif kind == "note":
        at = PAGE + STREAMS + _slot() + 64
        content[at : at + 12] = draw.choice((b"[" * 12, b'{"\x1b[2J": 1', b"\xff" * 12, b"NaN", b"9" * 12))[:12].ljust(
            12
        )
    path.write_bytes(content)
    if kind == "name":
        path.rename(path.with_name(draw.choice(("rank-.times", "rank-x.times", "rank-99999999999999999999.times"))))
    elif kind == "file":
        told = spoil(path, draw)
    return f"{kind} {told}"


def read_hostile_steps(folder: Path) -> str:
    """``refused`` or ``read``; or what went wrong. What becomes traces is diagnosed."""
    try:
        write_traces(folder / KEPT, folder / FOLDER)
    except RuntimeFault:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    outcome = read_hostile_trace(folder)
    shutil.rmtree(folder / FOLDER)
    return outcome
