"""Reads files of traces as JSON, plain or gzip, with limits that are checked before anything is parsed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from math import isfinite, nan
from pathlib import Path
from typing import Any, NoReturn

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.source import Source

MOST_BYTES = 1 << 29
"""Largest file of a trace, unpacked."""
MOST_FILES = 4096
_MOST_MICROSECONDS = 1e15
_GZIP = b"\x1f\x8b"

Event = dict[str, Any]


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object of a trace, which has a list ``traceEvents``.

    Raises `DiagnosticError` (S616) for every other file, and for one above `MOST_BYTES`, packed or not.
    """
    source = Source(str(path), "")
    try:
        document = json.loads(_unpacked(path, source))
    except (ValueError, RecursionError) as error:
        refuse(source, f"not JSON: {error}")
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        refuse(source, "no JSON object with a list `traceEvents`")
    return document


def slices(document: dict[str, Any], source: Source) -> Iterator[tuple[Event, float, float]]:
    """The complete events that have a name, each with begin and end in milliseconds of the file's clock.

    Raises `DiagnosticError` (S616) for an event without finite times.
    """
    base = _number(document.get("baseTimeNanoseconds", 0)) / 1e6
    base = base if isfinite(base) else 0.0
    for number, event in enumerate(document["traceEvents"]):
        if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
            continue
        start, length = _number(event.get("ts")), _number(event.get("dur", 0))
        if not (isfinite(start) and length >= 0):
            given = f"ts {event.get('ts')!r:.80}, dur {event.get('dur')!r:.80}"
            refuse(source, f"event {number} ({event['name'][:80]}) has no times: {given}")
        yield event, base + start / 1000, base + (start + length) / 1000


def refuse(source: Source, message: str, *notes: str, help: str = "") -> NoReturn:
    """Raises S616: the file is no trace from which a step can be replayed."""
    help = help or "give the file of `schedc run SCHEDULE --trace FILE`, or one file per rank of torch.profiler"
    raise DiagnosticError(
        [Diagnostic("S616", f"not a trace to diagnose: {message}", notes=notes, help=help, source=source)]
    )


def _unpacked(path: Path, source: Source) -> str:
    limit = f"larger than {MOST_BYTES >> 20} MiB unpacked; trace fewer steps"
    try:
        if not path.is_file():
            refuse(source, "no regular file")
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed:
                with gzip.open(file) as inner:
                    raw = inner.read(MOST_BYTES + 1)
            else:
                raw = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        refuse(source, f"damaged gzip: {error}")
    except OSError as error:
        refuse(source, f"it cannot be read: {error.strerror}")
    if len(raw) > MOST_BYTES:
        refuse(source, limit)
    return raw.decode("utf-8")


def _number(value: Any) -> float:
    """The value if it is a finite number of a sane size, else NaN."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_MICROSECONDS * 1e6
    return float(value) if fits else nan
