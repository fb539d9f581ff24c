"""Publishes where a rank stands, in memory that other processes of its machine read, also after its death.

A rank writes one word per instruction into its page. The other ranks map the page while the pipeline is built. Their
view is therefore never older than the instruction, whatever happens to the process.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import NamedTuple

_SIZE = 1 << 16
_WORD, _PROGRAM, _LENGTHS, _ACTIVITY, _PARTS = 0, 1, 2, 64, 512
"""Indices of words: mark of the instruction, index of its program, length of the table of parts. Then offsets in bytes:
of the activity, and of the table."""
_MARKS = 1 << 12
"""Number of parts that a mark can tell apart."""
WHOLE = _MARKS - 1
"""The part of a mark that means the whole instruction."""


class Position(NamedTuple):
    """Where a rank stands.

    activity: such as ``in step 3``. program: number of its program. row: row of the running instruction in the program,
    or -1. part: the micro-step of the instruction, or "".
    """

    activity: str
    program: int
    row: int
    part: str


def mark(row: int, part: int) -> int:
    """The word for an instruction: its row, and its part in the stream's table. The last part includes all above."""
    return row * _MARKS + min(part, _MARKS - 1)


class Progress:
    """This rank's page. ``word[0]`` is the `mark` of the running instruction, or -1.

    shared: whether other processes may read the page. descriptor: file descriptor of the page; -1 if it is not shared.
    """

    def __init__(self, shared: bool = True) -> None:
        self.descriptor = _shared(_SIZE) if shared else -1
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        words = memoryview(self._memory)[:_ACTIVITY].cast("q")
        self.word, self._words = words[:1], words
        self.say("building the pipeline")

    def say(self, activity: str, *, keep: bool = False) -> None:
        """Set the activity of this rank. keep: leave the instruction as it is."""
        if not keep:
            self.word[0] = -1
        text = activity.encode()[: _PARTS - _ACTIVITY]
        self._memory[_ACTIVITY:_PARTS] = text.ljust(_PARTS - _ACTIVITY, b"\0")

    def begin(self, program: int, parts: list[str]) -> None:
        """Begin an instruction stream of ``program``, whose marks refer to ``parts``."""
        table = json.dumps(parts).encode()
        table = table if len(table) <= _SIZE - _PARTS else b"[]"
        self._words[_PROGRAM], self._words[_LENGTHS] = program, len(table)
        self._memory[_PARTS : _PARTS + len(table)] = table

    def read(self) -> Position:
        """The position, as other ranks read it."""
        return _read(self._memory)

    def close(self) -> None:
        """Close the descriptor: no further process can map the page, and present readers go on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class PeerProgress:
    """Another rank's page, read only. Raises OSError if it cannot be mapped."""

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
