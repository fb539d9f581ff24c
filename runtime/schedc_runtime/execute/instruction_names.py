"""How instructions are called: in traces (torch's notation) and in error messages (a readable line)."""

from __future__ import annotations

from schedc.ir.program import Channel, InstructionKind, Program
from schedc.ir.works import FACTS
from schedc_runtime.ranks.progress import ENDED, Position

_LETTER = {Channel.ACTIVATION: "F", Channel.GRADIENT: "B"}
_NEXT = {Channel.ACTIVATION: 1, Channel.GRADIENT: -1}
_WORD = {Channel.ACTIVATION: "activation", Channel.GRADIENT: "gradient"}


def instruction_label(program: Program, row: int) -> str:
    """The instruction in the notation of torch's schedule files: ``0F3``, ``1RECV_F3``, ``(0F3;3B1)OVERLAP_F_B``.

    As there, SEND names the stage that produced the message and RECV the stage that will use it. A WAIT is written
    like the SEND or RECV that it completes.
    """
    x = program.instruction(row)
    if x.kind is InstructionKind.CELL:
        return f"({x.stage}F{x.microbatch};{x.stage2}{x.kind_name[1]}{x.microbatch2})OVERLAP_F_B"
    if x.kind is InstructionKind.REDUCE:
        return f"{x.stage}REDUCE_TIED" if x.is_tied else f"{x.stage}REDUCE_GRAD"
    if x.work >= 0:
        what = FACTS[program.works.work(x.work).kind].name.upper()
        return f"{x.stage}{x.kind.name}_{what}{x.microbatch if x.microbatch >= 0 else ''}"
    if x.channel < 0:
        return f"{x.stage}{x.kind.name}{x.microbatch}"
    channel, arrives = Channel(x.channel), receives(program, row)
    stage = x.stage + _NEXT[channel] if arrives else x.stage
    verb = "RECV" if arrives else "SEND"
    wait = "WAIT_" if x.kind is InstructionKind.WAIT else ""
    return f"{stage}{wait}{verb}_{_LETTER[channel]}{x.microbatch}"


def batch_label(program: Program, row: int, rows: int, part: str) -> str:
    """The labels of ``rows`` instructions from ``row`` on, which run as one step. part: the micro-step, or ""."""
    return " + ".join(instruction_label(program, r) for r in range(row, row + rows)) + (f" {part}" if part else "")


def sentence(program: Program, row: int) -> str:
    """The instruction in words: the label, and for a message its contents and the peer."""
    x = program.instruction(row)
    if x.is_tied:
        what = f"the gradients of the weights that stage {x.stage} shares with stage {x.stage2}"
        return f"{instruction_label(program, row)}: sum {what} with rank {x.peer}"
    if x.kind is InstructionKind.REDUCE:
        return f"{instruction_label(program, row)}: sum the weight gradients of stage {x.stage} with rank {x.peer}"
    if x.work >= 0:
        verb = "start the" if x.kind is InstructionKind.START else "wait for the"
        return f"{instruction_label(program, row)}: {verb} {program.works.work(x.work)}"
    if x.channel < 0:
        return instruction_label(program, row)
    what = f"{_WORD[Channel(x.channel)]} of stage {x.stage}, microbatch {x.microbatch}"
    arrives = receives(program, row)
    way = f"{'from' if arrives else 'to'} rank {x.peer}"
    verb = {
        (InstructionKind.SEND, False): "send the",
        (InstructionKind.RECV, True): "post the receive of the",
        (InstructionKind.WAIT, False): "wait until the",
        (InstructionKind.WAIT, True): "wait for the",
    }[x.kind, arrives]
    sent = " has been sent" if (x.kind is InstructionKind.WAIT and not arrives) else ""
    return f"{instruction_label(program, row)}: {verb} {what}{sent} {way}"


def place_in_words(position: Position, program: Program | None) -> str:
    """What a rank does and where in its program. program: as far as it is known; else the activity alone."""
    if position.row < 0 or program is None or position.row >= len(program.kind):
        return position.activity + ", behind its last instruction" * (position.row == ENDED)
    part = f" ({position.part})" if position.part else ""
    return f"{position.activity} at {sentence(program, position.row)}{part} --> {program.where(position.row)}"


def receives(program: Program, row: int) -> bool:
    """Whether a SEND, RECV or WAIT concerns a message to this rank, from a stage of another rank."""
    if program.kind[row] != InstructionKind.WAIT:
        return bool(program.kind[row] == InstructionKind.RECV)
    place = program.placement
    pipe = int(place.pipe_of_microbatch(program.microbatch[row : row + 1])[0])
    return bool(place.rank_of_stage[pipe, program.stage[row]] != program.rank[row])
