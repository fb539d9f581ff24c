"""Where a rank stands, in memory that other processes of its machine read, too, also after its death.

A rank writes one word per instruction into a page of its own. The others map that page while the pipeline is built, so
that what they read is never older than the instruction, whatever became of its process.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import NamedTuple

_SIZE = 1 << 16
_WORD, _PROGRAM, _LENGTHS, _ACTIVITY, _PARTS = 0, 1, 2, 64, 512
"""Words: the mark of the instruction, the index of its program, the length of the table of parts. Bytes where the
activity begins, and the table."""
_MARKS = 1 << 12
"""Parts that a mark can tell apart."""


class Position(NamedTuple):
    """activity: what the rank is about, such as ``in step 3``. program: which of its programs; row: of the running
    instruction there, or -1; part: which micro-step of it, if it has such."""

    activity: str
    program: int
    row: int
    part: str


def mark(row: int, part: int) -> int:
    """The word for an instruction: its row and which of the stream's parts it is at; the last stands for all above."""
    return row * _MARKS + min(part, _MARKS - 1)


class Progress:
    """This rank's page. ``word[0]`` is the `mark` of the instruction that runs, or -1.

    shared: whether others are to read it. descriptor: of the page, for them to map; -1 where nobody can.
    """

    def __init__(self, shared: bool = True) -> None:
        self.descriptor = _shared(_SIZE) if shared else -1
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        words = memoryview(self._memory)[:_ACTIVITY].cast("q")
        self.word, self._words = words[:1], words
        self.say("building the pipeline")

    def say(self, activity: str, *, keep: bool = False) -> None:
        """What this rank is about now. keep: leave the instruction where it is."""
        if not keep:
            self.word[0] = -1
        text = activity.encode()[: _PARTS - _ACTIVITY]
        self._memory[_ACTIVITY:_PARTS] = text.ljust(_PARTS - _ACTIVITY, b"\0")

    def begin(self, program: int, parts: list[str]) -> None:
        """A stream of ``program`` begins, whose marks count in ``parts``."""
        table = json.dumps(parts).encode()
        table = table if len(table) <= _SIZE - _PARTS else b"[]"
        self._words[_PROGRAM], self._words[_LENGTHS] = program, len(table)
        self._memory[_PARTS : _PARTS + len(table)] = table

    def read(self) -> Position:
        """As the others read it."""
        return _read(self._memory)

    def close(self) -> None:
        """Nobody maps the page any more; whoever has goes on to read it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class PeerProgress:
    """Another rank's page, read only. Raises OSError if it cannot be had."""

    def __init__(self, pid: int, descriptor: int) -> None:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as page:
            self._memory = mmap.mmap(page.fileno(), _SIZE, access=mmap.ACCESS_READ)

    def read(self) -> Position:
        return _read(self._memory)


def _shared(size: int) -> int:
    try:
        descriptor = os.memfd_create("schedc-progress")
    except (AttributeError, OSError):
        return -1
    os.ftruncate(descriptor, size)
    return descriptor


def _read(memory: mmap.mmap) -> Position:
    words = memoryview(memory)[:_ACTIVITY].cast("q")
    word, program, length = words[_WORD], words[_PROGRAM], words[_LENGTHS]
    activity = memory[_ACTIVITY:_PARTS].rstrip(b"\0").decode(errors="replace")
    if word < 0:
        return Position(activity, program, -1, "")
    row, part = divmod(word, _MARKS)
    try:
        parts = json.loads(memory[_PARTS : _PARTS + length])
    except ValueError:  # read while it was being written
        parts = []
    return Position(activity, program, row, parts[part] if part < len(parts) else "")
