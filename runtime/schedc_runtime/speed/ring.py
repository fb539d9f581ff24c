"""The last 32 steps of a rank, instruction by instruction, in a file of shared memory that outlives the process.

    0        header    magic, version, sizes; what the rank and its schedule are called
    4096     streams   JSON: names of the steps of each stream that was run
    then     32 slots  one for each training step, the oldest is written over

    slot     8 words   step, stream, state, begin, clock, length of the note, 0, 0
             note      JSON: what level 2 adds
             times     end and processor time of each step of the stream, 8 bytes each

A step of a stream begins where the step before it ends, and waits as long as it takes without the processor. Times are
written while a step runs, so that a rank that is killed leaves the times of its last step, too.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import StreamTimes
from schedc_runtime.saved.form import read_bytes

STEPS = 32
"""Steps that are kept."""
SUFFIX = ".times"
_MAGIC, _VERSION = b"schedcTM", 1
_HEADER = struct.Struct("<8sIIQQ")
_PAGE, _STREAMS, _WORDS = 4096, 1 << 18, 8
"""Bytes of the header and of the streams; words of a slot before its note."""
_STEP, _STREAM, _STATE, _BEGIN, _CLOCK, _NOTED = range(6)
_RUNNING, _WHOLE = 1, 2
_MOST = 1 << 30
"""Bytes of a file that is read."""


class RunStream(NamedTuple):
    """What a rank runs. schedule: its name. names: [steps] as in traces. compute: [steps] whether it is compute."""

    schedule: str
    names: list[str]
    compute: list[bool]


class KeptStep(NamedTuple):
    """A step of a rank.

    whole: whether it ended. begin: ns since 1970. ends: [steps] ns since 1970 at the end of each, as far as the rank
    came. spent: [steps] ns of the processor. note: as of `StepRing.end`.
    """

    step: int
    whole: bool
    stream: RunStream
    begin: int
    ends: list[int]
    spent: list[int]
    note: dict[str, Any]


class StepRing:
    """The file of one rank. note: bytes that a step may add to its times (`end`).

    Raises `RuntimeFault` where memory is too small.
    """

    def __init__(self, path: Path, note: int = 0) -> None:
        self.path, self._note = path, -(-note // 8) * 8
        self._streams: list[RunStream] = []
        self._capacity = -1
        self._memory: mmap.mmap | None = None
        self._slot: memoryview | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of a step."""
        return _WORDS * 8 + self._note + 16 * self._capacity

    def begin(self, step: int, stream: RunStream) -> StreamTimes:
        """Where the times of a step go. A stream that is longer than all before begins a new file."""
        number = self._number(stream)
        slot = self._slot_of(step)
        slot[_STATE] = 0
        count = len(stream.names)
        start = _WORDS + self._note // 8
        slot[start : start + 2 * count] = memoryview(bytes(16 * count)).cast("q")
        now = perf_counter_ns()
        slot[_STEP], slot[_STREAM], slot[_BEGIN], slot[_CLOCK], slot[_NOTED] = step, number, now, time_ns() - now, 0
        slot[_STATE] = _RUNNING
        self._slot = slot
        return StreamTimes(slot[start + count : start + 2 * count], slot[start : start + count], (True,) * count)

    def end(self, note: dict[str, Any] | None = None) -> None:
        """The step has ended. note: JSON to keep beside its times; left out where it is too long."""
        if self._slot is None:
            return
        text = json.dumps(note).encode() if note else b""
        if 0 < len(text) <= self._note:
            self._slot.cast("B")[_WORDS * 8 : _WORDS * 8 + len(text)] = text
            self._slot[_NOTED] = len(text)
        self._slot[_STATE], self._slot = _WHOLE, None

    def close(self, *, remove: bool = False) -> None:
        """Leave the file as it is, or remove it."""
        self._slot = self._memory = None
        if remove:
            self.path.unlink(missing_ok=True)

    def _number(self, stream: RunStream) -> int:
        """The number of a stream in the file, which is made anew where the stream does not fit."""
        if stream in self._streams:
            return self._streams.index(stream)
        text = json.dumps([*self._streams, stream]).encode()
        if len(stream.names) > self._capacity or len(text) > _STREAMS:
            self._streams, text = [], json.dumps([stream]).encode()
            if len(text) > _STREAMS:
                raise RuntimeFault(
                    f"the names of {len(stream.names):,} instructions take {len(text):,} bytes, and a file of the last"
                    f" steps has {_STREAMS:,} for them",
                    "watch at level 0",
                )
            self._make(len(stream.names))
        self._streams.append(stream)
        assert self._memory is not None
        self._memory[_PAGE : _PAGE + len(text)] = text
        self._memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._note, self._capacity, len(text))
        return len(self._streams) - 1

    def _make(self, capacity: int) -> None:
        self._capacity = max(capacity, self._capacity)
        self.path.unlink(missing_ok=True)
        size = _PAGE + _STREAMS + STEPS * self.slot_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
        except OSError as error:
            self.path.unlink()
            help = "name another folder: watch_speed(pipe, level=1, folder=...), or watch at level 0"
            raise RuntimeFault(f"{self.path.parent} has no {size:,} bytes for the last steps: {error}", help) from None
        finally:
            os.close(descriptor)

    def _slot_of(self, step: int) -> memoryview:
        assert self._memory is not None
        begin = _PAGE + _STREAMS + step % STEPS * self.slot_bytes
        return memoryview(self._memory)[begin : begin + self.slot_bytes].cast("q")


def kept_steps(path: Path) -> list[KeptStep]:
    """The steps in the file of a rank, oldest first. Raises `RuntimeFault` for a file that is none."""
    try:
        content = read_bytes(path, _MOST)
    except (OSError, ValueError) as error:
        raise _foreign(path, str(error)) from None
    if len(content) < _PAGE + _STREAMS:
        raise _foreign(path, f"it has {len(content):,} bytes")
    magic, version, note, capacity, length = _HEADER.unpack_from(content)
    size = _WORDS * 8 + note + 16 * capacity
    if magic != _MAGIC or version != _VERSION:
        raise _foreign(path, "its header is another one")
    if note % 8 or length > _STREAMS or len(content) != _PAGE + _STREAMS + STEPS * size:
        raise _foreign(path, "its sizes do not add up")
    try:
        streams = [RunStream(*each) for each in json.loads(content[_PAGE : _PAGE + length])]
        body = content[_PAGE + _STREAMS :]
        steps = [_kept(body[slot * size : (slot + 1) * size], note, capacity, streams) for slot in range(STEPS)]
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _foreign(path, f"its content cannot be read ({type(error).__name__})") from None
    return sorted((step for step in steps if step is not None), key=lambda step: step.step)


def _kept(slot: bytes, note: int, capacity: int, streams: Sequence[RunStream]) -> KeptStep | None:
    words = struct.unpack_from(f"<{_WORDS}q", slot)
    if words[_STATE] not in (_RUNNING, _WHOLE):
        return None
    stream = streams[words[_STREAM]]
    count = len(stream.names)
    if count > capacity or count != len(stream.compute) or not 0 <= words[_NOTED] <= note:
        raise ValueError("sizes of a step")
    if not all(isinstance(name, str) for name in (stream.schedule, *stream.names)):
        raise ValueError("names of a stream")
    times = struct.unpack_from(f"<{2 * count}q", slot, _WORDS * 8 + note)
    came = next((place for place, end in enumerate(times[:count]) if not end), count)
    told = json.loads(slot[_WORDS * 8 : _WORDS * 8 + words[_NOTED]]) if words[_NOTED] else {}
    ends = [end + words[_CLOCK] for end in times[:came]]
    begin = words[_BEGIN] + words[_CLOCK]
    whole = words[_STATE] == _WHOLE
    return KeptStep(words[_STEP], whole, stream, begin, ends, list(times[count : count + came]), told)


def write_traces(folder: Path, out: Path) -> list[Path]:
    """Write a Chrome trace for each step that is kept in all files of a folder; the names of the files.

    ``schedc diagnose`` reads them. A step that a rank did not end is in ``cut-00000057.trace``, as far as ranks came.
    Raises `RuntimeFault` where no step is kept by all ranks.
    """
    paths = [path for path in sorted(folder.glob(f"rank-*{SUFFIX}")) if path.stem[5:].isdecimal()]
    ranks = {int(path.stem[5:]): {step.step: step for step in kept_steps(path)} for path in paths}
    common = sorted(set.intersection(*(set(steps) for steps in ranks.values()))) if ranks else []
    if not common:
        help = "files of one run are named rank-0000.times and so on: watch_speed(pipe, level=1, folder=...)"
        raise RuntimeFault(f"{folder} has no step that all of its {len(ranks)} files of last steps have", help)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for step in common:
        here = {rank: steps[step] for rank, steps in ranks.items()}
        whole = all(each.whole for each in here.values())
        written.append(out / (f"step-{step:08}.json" if whole else f"cut-{step:08}.trace"))
        written[-1].write_text(json.dumps(_document(here)), encoding="utf-8")
    return written


def _document(ranks: dict[int, KeptStep]) -> dict[str, Any]:
    """One step of all ranks as a Chrome trace, in microseconds from its first instruction."""
    start = min(kept.begin for kept in ranks.values())
    events = []
    for rank, kept in ranks.items():
        begins = [kept.begin, *kept.ends]
        for begin, end, spent, name, compute in zip(
            begins, kept.ends, kept.spent, kept.stream.names, kept.stream.compute, strict=False
        ):
            where = {"pid": rank, "tid": int(not compute), "ts": (begin - start) / 1000, "dur": (end - begin) / 1000}
            off_core = {"off core us": (end - begin - spent) / 1000} if compute and spent < end - begin else {}
            events.append({"ph": "X", "name": name, **where, "args": off_core})
    schedule = next(iter(ranks.values())).stream.schedule
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": schedule}}


def _foreign(path: Path, why: str) -> RuntimeFault:
    help = "watch_speed(pipe, level=1, folder=...) writes such files"
    return RuntimeFault(f"{path} is no file of the last steps of a rank: {why}", help)
