"""A rank's stream with a cell opened: the messages in front of it and behind it move to where its halves need them.

    WAIT activation   CELL F & B   SEND activation   SEND gradient   RECV next        becomes

    F opens at WAIT activation | ... | F is complete: SEND activation | ... | B is complete: SEND gradient, RECV next

Posts move up and keep their order; waits for what the cell takes move down, past micro-steps and posts. So before
each post stand no more waits than before, and the proof that the messages complete (docs/decisions/0001) holds as it
is; `schedc.cell.collectives` runs it with the collectives of the cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedc.cell.program import CellProgram, Edge, Half, Step
from schedc.ir.program import Channel, Instruction, InstructionKind

POSTS = (InstructionKind.SEND, InstructionKind.RECV)
_BACKWARDS = (InstructionKind.I, InstructionKind.B)


class MovedMessage(NamedTuple):
    """A WAIT, or the first message of a batch, that moves into a cell; ``at``: its place in the stream."""

    at: int


Part = Step | Edge | MovedMessage
Value = tuple[int, int, int]
"""What a message carries: its channel, the stage that has produced it, the microbatch."""


def interleave_messages(stream: Sequence[Instruction], position: int, program: CellProgram) -> list[Part]:
    """The cell at ``position`` of a rank's stream as its micro-steps, with the messages that move into it."""
    takes, makes = _values(stream[position])
    waits = {takes[value]: at for at, value in _waits_before(stream, position) if value in takes}
    posts = [(at, {makes[value] for value in sent if value in makes}) for at, sent in _batches_behind(stream, position)]
    found: list[Part] = []
    complete: set[Half] = set()

    def post() -> None:
        while posts and posts[0][1] <= complete:
            found.append(MovedMessage(posts.pop(0)[0]))

    post()
    for part in program.parts:
        if isinstance(part, Edge) and part.opens and part.half in waits:
            found.append(MovedMessage(waits[part.half]))
        found.append(part)
        if isinstance(part, Edge) and not part.opens:
            complete.add(part.half)
            post()
    return found


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
    pair = item.kind is InstructionKind.CELL
    if pair or item.kind is InstructionKind.F:
        takes[Channel.ACTIVATION, item.stage - 1, item.microbatch] = Half.FORWARD
        makes[Channel.ACTIVATION, item.stage, item.microbatch] = Half.FORWARD
    if pair or item.kind in _BACKWARDS:
        stage, microbatch = item.backward_slot
        takes[Channel.GRADIENT, stage + 1, microbatch] = Half.BACKWARD
        makes[Channel.GRADIENT, stage, microbatch] = Half.BACKWARD
    return takes, makes


def _waits_before(stream: Sequence[Instruction], position: int) -> Iterator[tuple[int, Value]]:
    """The waits between an instruction and the compute or reduction before it: their places, and for what."""
    for at in range(position - 1, -1, -1):
        item = stream[at]
        if item.kind is InstructionKind.WAIT:
            yield at, (item.channel, item.stage, item.microbatch)
        elif item.kind not in POSTS:
            return


def _batches_behind(stream: Sequence[Instruction], position: int) -> Iterator[tuple[int, list[Value]]]:
    """The batches posted between an instruction and the next compute or reduction: their places, and what is sent."""
    at = position + 1
    while at < len(stream) and stream[at].kind in (*POSTS, InstructionKind.WAIT):
        if stream[at].kind is InstructionKind.WAIT:
            at += 1
            continue
        batch = stream[at : at + batch_width(stream, at)]
        yield at, [(x.channel, x.stage, x.microbatch) for x in batch if x.kind is InstructionKind.SEND]
        at += len(batch)
