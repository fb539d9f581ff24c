"""What each kind of instruction does, one function per kind in a table; none of them decides when.

To change what an instruction does, change its function here, and the same in `written_out.py` where it has a writer. To
add an instruction:

    schedc/ir/program.py    its `InstructionKind`
    operands.py, bind.py    its operands, and how they follow from a row (`F` to `R` share `ComputeOperands`)
    handlers.py             its function, which reads and writes `Registers` only, and its row in `HANDLERS`

A handler that starts a sum of gradients appends a `PendingSum` to ``registers.pending``: the executor completes it at
the end of the stream. A handler that would have to wait returns True and is called again later. START and JOIN are in
`works.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from schedc.ir.program import InstructionKind
from schedc_runtime.execute.code import Handler
from schedc_runtime.execute.operands import (
    ComputeOperands,
    MessageOperands,
    PairOperands,
    ReduceOperands,
    WaitOperands,
)
from schedc_runtime.execute.registers import Registers
from schedc_runtime.execute.tied_sums import TiedOperands, TiedSum
from schedc_runtime.execute.works import join_work, start_work
from schedc_runtime.transport.base import Transfer, Transport
from schedc_runtime.transport.flat_tensors import by_dtype, flattened, unflattened

_new_tuple: Any = tuple.__new__


def forward(registers: Registers, op: ComputeOperands) -> None:
    """F: the stage's outputs for one microbatch."""
    stage, microbatch, read, _, _, _, recomputed = op
    inputs, target = registers.take(read), registers.targets[microbatch]
    keep_outputs(
        registers, op, stage.forward(microbatch, inputs, target, registers.loss_scale, recompute_later=recomputed)
    )


def keep_outputs(registers: Registers, op: ComputeOperands, outputs: tuple[torch.Tensor, ...]) -> None:
    """Put a forward's outputs, in the boundary's shapes, into their slot, and probe them if the step wants it."""
    if op.write >= 0:
        registers.values[op.write] = outputs
    if registers.probing:
        for position, options in op.probes:
            registers.probes.append((op, outputs[position].sum(**options)))


def backward(registers: Registers, op: ComputeOperands) -> None:
    """I or B: the gradients of the stage's inputs, with B those of its weights, too."""
    stage, microbatch, read, write, defer, _, _ = op
    gradients = stage.backward(microbatch, registers.take(read) if read >= 0 else (), defer=defer)
    if write >= 0:
        registers.values[write] = gradients


def weight(registers: Registers, op: ComputeOperands) -> None:
    """W: the weight gradients that an I has left."""
    op.stage.weight(op.microbatch)


def recompute(registers: Registers, op: ComputeOperands) -> None:
    """R: what the forward did not keep for the backward."""
    op.stage.recompute(op.microbatch)


def cell(registers: Registers, op: PairOperands) -> None:
    """CELL: the first op, then the second. An overlapping version is bound in place of this one."""
    for kind, operands in zip(op.kinds, (op.first, op.second), strict=True):
        HANDLERS[InstructionKind(kind)](registers, operands)


def post(registers: Registers, batch: tuple[MessageOperands, ...]) -> None:
    """SEND and RECV: start all messages of a batch at once."""
    transfers, values, forms, handles = [], registers.values, registers.forms, registers.handles
    for receive, peer, edge, slot, _, communicator in batch:
        form = forms[edge]
        tensors: tuple[torch.Tensor, ...] = ()
        if not receive:
            tensors = values[slot] or registers.take(slot)
            values[slot] = None
            form.check(tensors)
        elif not registers.cooperative:
            tensors = form.buffers(registers.device)
        # In C, where the class is not.
        transfers.append(_new_tuple(Transfer, (peer, receive, tensors, communicator, form)))
    for message, handle in zip(batch, registers.transport.post(transfers), strict=True):
        handles[message.handle] = handle


def wait(registers: Registers, op: WaitOperands) -> bool | None:
    """WAIT: until a message is complete; what was received is then a value."""
    index, slot = op
    handle = registers.handles[index] or registers.posted(index)
    if not registers.cooperative:
        registers.transport.wait(handle)
    elif not registers.transport.ready(handle):
        return True
    registers.handles[index] = None
    if slot >= 0:
        registers.values[slot] = handle.tensors
    return None


@dataclass(frozen=True)
class CopySum:
    """This step's gradients of parameters of one dtype, on their way between the two ranks that hold a stage.

    theirs: [elements + parameters] what the other rank sends, as `flattened` lays it out.
    """

    transport: Transport
    handles: Sequence[Any]
    parameters: Sequence[torch.nn.Parameter]
    theirs: torch.Tensor

    def ready(self) -> bool:
        return not self.transport.cooperative or all(self.transport.ready(handle) for handle in self.handles)

    def finish(self) -> None:
        """Add the gradients that the other copy has sent."""
        for handle in self.handles:
            self.transport.wait(handle)
        own = [parameter.grad is not None for parameter in self.parameters]
        for parameter, part in unflattened(self.parameters, self.theirs, own):
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad += part


def reduce(registers: Registers, op: ReduceOperands | TiedOperands) -> None:
    """REDUCE: exchange this step's weight gradients with the other copy of the stage, one tensor per dtype."""
    if isinstance(op, TiedOperands):
        reduce_tied(registers, op)
        return
    for group in by_dtype(op.parameters):
        mine = flattened(group)
        theirs = torch.empty_like(mine)
        handles = registers.transport.post([Transfer(op.peer, True, (theirs,)), Transfer(op.peer, False, (mine,))])
        registers.pending.append(CopySum(registers.transport, handles, group, theirs))


def reduce_tied(registers: Registers, op: TiedOperands) -> None:
    """REDUCE of tied weights: exchange this step's gradients with another copy; the last exchange starts the sum."""
    if op.tie not in registers.tied:
        registers.tied[op.tie] = TiedSum(registers.transport, op)
    registers.tied[op.tie].exchange(op)
    if op.last:
        registers.pending.append(registers.tied.pop(op.tie))


HANDLERS: Mapping[InstructionKind, Handler] = {
    InstructionKind.F: forward,
    InstructionKind.I: backward,
    InstructionKind.B: backward,
    InstructionKind.W: weight,
    InstructionKind.R: recompute,
    InstructionKind.CELL: cell,
    InstructionKind.SEND: post,
    InstructionKind.RECV: post,
    InstructionKind.WAIT: wait,
    InstructionKind.REDUCE: reduce,
    InstructionKind.START: start_work,
    InstructionKind.JOIN: join_work,
}
"""One handler per kind. SEND and RECV share one: what is posted together is one step of the stream."""
