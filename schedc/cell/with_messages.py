"""Moves the messages before and behind a cell into it, to where its halves need them.

    WAIT activation   CELL F & B   SEND activation   SEND gradient   RECV next        becomes

    F opens at WAIT activation | ... | F is complete: SEND activation | ... | B is complete: SEND gradient, RECV next

Posts move up and keep their order. Waits for the cell's inputs move down, past micro-steps and posts. So no post has
more waits before it than in the stream, and the proof that the messages complete (docs/decisions/0001) still holds.
`schedc.cell.collectives` checks them together with the collectives of the cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedc.cell.program import CellProgram, CellStep, Edge, Half
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Channel, Instruction, InstructionKind

POSTS = (InstructionKind.SEND, InstructionKind.RECV)
_WORKS = (InstructionKind.START, InstructionKind.JOIN)
"""Messages move past works, which stay where they are."""


class MovedMessage(NamedTuple):
    """A WAIT, or the first message of a batch, that moves into a cell. at: its position in the stream."""

    at: int


Part = CellStep | Edge | MovedMessage
Value = tuple[int, int, int]
"""The value in a message: channel, producing stage, microbatch."""


def interleave_messages(stream: Sequence[Instruction], position: int, program: CellProgram) -> list[Part]:
    """The micro-steps of the cell at ``position`` of a rank's stream, with the messages that move into the cell."""
    takes, makes = _values(stream[position])
    waits = {takes[value]: index for index, value in _waits_before(stream, position) if value in takes}
    posts = [
        (index, {makes[value] for value in sent if value in makes}) for index, sent in _batches_behind(stream, position)
    ]
    parts: list[Part] = []
    complete: set[Half] = set()

    def post() -> None:
        while posts and posts[0][1] <= complete:
            parts.append(MovedMessage(posts.pop(0)[0]))

    post()
    for part in program.parts:
        if isinstance(part, Edge) and part.opens and part.half in waits:
            parts.append(MovedMessage(waits[part.half]))
        parts.append(part)
        if isinstance(part, Edge) and not part.opens:
            complete.add(part.half)
            post()
    return parts


def batch_width(stream: Sequence[Instruction], position: int) -> int:
    """Number of neighbouring SEND and RECV, from ``position`` on, that are posted by one call."""
    end = position + 1
    batch = stream[position].batch
    while batch >= 0 and end < len(stream) and stream[end].kind in POSTS and stream[end].batch == batch:
        end += 1
    return end - position


def _values(item: Instruction) -> tuple[dict[Value, Half], dict[Value, Half]]:
    """What the halves of a compute instruction take from other stages, and what they make for others."""
    takes: dict[Value, Half] = {}
    makes: dict[Value, Half] = {}
    for kind, stage, microbatch in item.ops:
        if kind is OpKind.F:
            takes[Channel.ACTIVATION, stage - 1, microbatch] = Half.FORWARD
            makes[Channel.ACTIVATION, stage, microbatch] = Half.FORWARD
        elif FACTS[kind].backward:
            takes[Channel.GRADIENT, stage + 1, microbatch] = Half.BACKWARD
            makes[Channel.GRADIENT, stage, microbatch] = Half.BACKWARD
    return takes, makes


def _waits_before(stream: Sequence[Instruction], position: int) -> Iterator[tuple[int, Value]]:
    """The waits between an instruction and the compute or reduction before it: their places, and for what."""
    for at in range(position - 1, -1, -1):
        item = stream[at]
        if item.kind is InstructionKind.WAIT:
            yield at, (item.channel, item.stage, item.microbatch)
        elif item.kind not in (*POSTS, *_WORKS):
            return


def _batches_behind(stream: Sequence[Instruction], position: int) -> Iterator[tuple[int, list[Value]]]:
    """The batches posted between an instruction and the next compute or reduction: places, and sent values."""
    at = position + 1
    while at < len(stream) and stream[at].kind in (*POSTS, InstructionKind.WAIT, *_WORKS):
        if stream[at].kind not in POSTS:
            at += 1
            continue
        batch = stream[at : at + batch_width(stream, at)]
        yield at, [(x.channel, x.stage, x.microbatch) for x in batch if x.kind is InstructionKind.SEND]
        at += len(batch)
