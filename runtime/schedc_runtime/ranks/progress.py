"""Publishes where a rank stands, in memory that other processes of its machine read, also after its death.

A rank writes one word per instruction into its page. The other ranks map the page while the pipeline is built. Their
view is therefore never older than the instruction, whatever happens to the process.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import NamedTuple

_SIZE = 1 << 16
_WORD, _PROGRAM, _LENGTHS, _CALL, _ROUND, _BEAT, _SINCE, _STACK = range(8)
"""Indices of words: mark of the instruction, index of its program, length of the table of parts, and the other fields
of `Position`."""
_ACTIVITY, _PARTS = 64, 512
"""Offsets in bytes: of the activity, and of the table of parts."""
OUTSIDE, ENDED, BEGUN = -1, -2, -3
"""Words in place of a mark: no stream runs; its last instruction has ended; its first one is still to come."""
_MARKS = 1 << 12
"""Number of parts that a mark can tell apart."""
WHOLE = _MARKS - 1
"""The part of a mark that means the whole instruction."""


class Position(NamedTuple):
    """Where a rank stands.

    activity: such as ``in step 3``. program: number of its program, in the order of first runs. row: row of the
    running instruction in the program, or one of `OUTSIDE`, `ENDED` and `BEGUN`. part: its micro-step, or "".
    call: number of instruction streams that the rank has begun.
    round: the last round of `ControlPlane` that it came to, twice, and one more while it waits for the answer.
    beat, since: when its watchdog last ran, and since when it has stood here, in ns of this machine's clock, or 0.
    stack: its descriptor for `stack_of`, or -1.
    """

    activity: str
    program: int
    row: int
    part: str
    call: int = 0
    round: int = 0
    beat: int = 0
    since: int = 0
    stack: int = -1


def mark(row: int, part: int) -> int:
    """The word for an instruction: its row, and its part in the stream's table. The last part includes all above."""
    return row * _MARKS + min(part, _MARKS - 1)


class Progress:
    """This rank's page. ``word[0]`` is the `mark` of the running instruction, or
    one of `OUTSIDE`, `ENDED` and `BEGUN`.

    shared: whether other processes may read the page. descriptor: file descriptor of the page; -1 if it is not shared.
    """

    def __init__(self, shared: bool = True) -> None:
        self.descriptor = _shared(_SIZE) if shared else -1
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        words = memoryview(self._memory)[:_ACTIVITY].cast("q")
        self.word, self._words = words[:1], words
        self._last: tuple[int, int, bytes] = (OUTSIDE, 0, b"")
        words[_STACK] = -1
        self.say("building the pipeline")

    def say(self, activity: str, *, keep: bool = False) -> None:
        """Set the activity of this rank. keep: leave the instruction as it is."""
        if not keep:
            self.word[0] = OUTSIDE
        text = activity.encode()[: _PARTS - _ACTIVITY]
        self._memory[_ACTIVITY:_PARTS] = text.ljust(_PARTS - _ACTIVITY, b"\0")

    def begin(self, program: int, parts: list[str]) -> None:
        """Begin an instruction stream of ``program``, whose marks refer to ``parts``."""
        table = json.dumps(parts).encode()
        table = table if len(table) <= _SIZE - _PARTS else b"[]"
        self._words[_PROGRAM], self._words[_LENGTHS] = program, len(table)
        self._memory[_PARTS : _PARTS + len(table)] = table
        self._words[_CALL] += 1
        self.word[0] = BEGUN

    def come(self, number: int, *, waits: bool) -> None:
        """This rank came to a round, and ``waits`` for its answer or has it."""
        self._words[_ROUND] = 2 * number + waits

    def beat(self, stack: int) -> None:
        """The watchdog runs: note when, and since when this rank has stood where it stands. stack: as of `Position`."""
        now, words = time.monotonic_ns(), self._words
        here = words[_WORD], words[_CALL], self._memory[_ACTIVITY:_PARTS]
        if here != self._last:
            self._last, words[_SINCE] = here, now
        words[_BEAT], words[_STACK] = now, stack

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
    others = words[_CALL], words[_ROUND], words[_BEAT], words[_SINCE], words[_STACK]
    if word < 0:
        return Position(activity, program, word, "", *others)
    row, part = divmod(word, _MARKS)
    try:
        parts = json.loads(memory[_PARTS : _PARTS + length])
    except ValueError:  # read while it was being written
        parts = []
    return Position(activity, program, row, parts[part] if part < len(parts) else "", *others)
