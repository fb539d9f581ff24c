"""What a trace says of every rank and step, in one form for all writers of traces: cells, waits and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from schedc.ir.ops import LETTERS
from schedc.source import Source

Op = tuple[int, int, int]
"""Kind, stage and microbatch."""
Key = tuple[int, int, int]
"""A message by who waits for it: 0 for a forward and 1 for a backward, its stage and its microbatch."""
Layer = tuple[int, int, int]
"""Stage, microbatch, and layer of the stage."""

_OP = rf"(\d{{1,9}})([{LETTERS}])(\d{{1,9}})"
_CELL = re.compile(rf"(?:{_OP}|\({_OP};{_OP}\)OVERLAP_F_B)(?P<part> .*)?", re.ASCII)
_PART = re.compile(r" (run|start|wait) (\w+) of (\d{1,9})\.(\w+)[.\w]*", re.ASCII)
_COPY = re.compile(r"\d{1,9}(?:START|JOIN)_(SNAPSHOT|OFFLOAD|FETCH)\d{0,9}", re.ASCII)
_MESSAGE = re.compile(r"(\d{1,9})(WAIT_|)(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)


class CopyRun(NamedTuple):
    """What a rank took to start a copy beside compute, or to join one. Times in ms; number: of cells in front of it.

    state: whether the copy is a piece of a snapshot; else an offload or a fetch.
    """

    begin: float
    end: float
    number: int
    state: bool


class ExpertRows(NamedTuple):
    """Rows of a rank's experts in a layer; of the fullest rank of its group; their mean."""

    own: float
    most: float
    mean: float


class LayerRun(NamedTuple):
    """A micro-step on the experts or on an exchange of a layer. Time in ms; cell: number of its cell on the rank."""

    action: str
    node: str
    layer: Layer
    cell: int
    time: float


class CellRun(NamedTuple):
    """A cell that ran. Times in ms.

    wait, waited: from when to when the rank may have waited in front of it. off_core: of its time, how long the thread
    was ready and had no core; collecting: how long garbage was collected. Both are 0 where the trace does not say.
    """

    ops: tuple[Op, ...]
    wait: float
    waited: float
    begin: float
    end: float
    off_core: float = 0.0
    collecting: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """A step of one rank, ms of a clock that all ranks share.

    begin: its first instruction. sent: when each of its messages was posted; posted: when each of its receives was.
    awaited: begin and end of the wait for each of its sends, and how many cells ran before. copies: in order.
    runs: micro-steps on experts and exchanges, in order; rows: of each layer that was routed.
    """

    begin: float
    cells: tuple[CellRun, ...]
    sent: Mapping[Key, float] = field(default_factory=dict)
    posted: Mapping[Key, float] = field(default_factory=dict)
    awaited: Mapping[Key, tuple[float, float, int]] = field(default_factory=dict)
    copies: Sequence[CopyRun] = ()
    runs: Sequence[LayerRun] = ()
    rows: Mapping[Layer, ExpertRows] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecording:
    """The steps of all ranks. ranks: [P][steps]. schedule: as the trace names it, or "". what: the writer's form.

    interruptions: whether the writer measures `CellRun.off_core` and `CellRun.collecting`.
    """

    source: Source
    ranks: tuple[tuple[RankStep, ...], ...]
    schedule: str
    what: str
    interruptions: bool = False

    def only(self, chosen: Sequence[int]) -> RunRecording:
        """The recording of some steps, by number."""
        return replace(self, ranks=tuple(tuple(steps[number] for number in chosen) for steps in self.ranks))


class MessageEnd(NamedTuple):
    """A message's end on this rank. verb: SEND, RECV, WAIT_SEND or WAIT_RECV."""

    verb: str
    key: Key


def cell_ops(name: str) -> tuple[tuple[Op, ...], str] | None:
    """The ops of ``0F3`` or ``(0F3;3B1)OVERLAP_F_B``, and the micro-step behind it; None for another name."""
    if not (match := _CELL.fullmatch(name)):
        return None
    fields = [field for field in match.groups()[:-1] if field is not None]
    triples = zip(*(iter(fields),) * 3, strict=True)
    return tuple((LETTERS.index(letter), int(stage), int(mb)) for stage, letter, mb in triples), match["part"] or ""


def named_micro_step(part: str) -> tuple[str, str, str, int] | None:
    """Action, half, node and layer of `` run forward of 0.experts``; None for what is on no layer."""
    match = _PART.fullmatch(part)
    return None if match is None else (match[1], match[2], match[4], int(match[3]))


def copies_state(name: str) -> bool | None:
    """Whether ``0START_SNAPSHOT`` or ``0JOIN_OFFLOAD3`` copies a piece of a state; None for what is no copy."""
    return match[1] == "SNAPSHOT" if (match := _COPY.fullmatch(name)) else None


def message_end(name: str) -> MessageEnd | None:
    """Reads ``0SEND_F3``: an end of a message in torch's notation, which names the stage of the rank itself."""
    if not (match := _MESSAGE.fullmatch(name)):
        return None
    stage, wait, verb, way, microbatch = match.groups()
    forward = way == "F"
    reader = int(stage) + ((1 if forward else -1) if verb == "SEND" else 0)
    return MessageEnd(wait + verb, (0 if forward else 1, reader, int(microbatch)))
