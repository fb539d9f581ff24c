"""What each kind of instruction does, as one function per kind in a table; none of them decides when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from schedc.ir.program import InstructionKind
from schedc_runtime.transport import Spec, Transfer, check_tensors
from schedc_runtime.transport.flat_tensors import by_dtype, flattened, unflattened

if TYPE_CHECKING:
    from schedc_runtime.execute.executor import Executor
    from schedc_runtime.stage.stage import Stage

Handler = Callable[["Executor", Any], bool | None]
"""Runs one instruction, given its operands. True means: not possible yet, come back (cooperative transports only)."""


class Compute(NamedTuple):
    """Operands of F, I, W, B and R.

    read, write: slots of the value consumed and produced: inputs and outputs of a forward, gradients of outputs and
        inputs of a backward; -1 where there is none (outer ends of the pipeline, W, R).
    defer: whether a backward leaves the weight gradients to a W.
    again: whether the microbatch has an R between its forward and its backward.
    probes: of a forward: positions of its floating outputs, and in which dtype to sum them (see `probes_of`).
    """

    stage: Stage
    microbatch: int
    read: int
    write: int
    defer: bool
    probes: tuple[tuple[int, torch.dtype | None], ...] = ()
    again: bool = False


class Cell(NamedTuple):
    """Operands of CELL: a forward and a backward of different microbatches."""

    forward: Compute
    backward: Compute


class Message(NamedTuple):
    """One SEND or RECV of a posted batch.

    specs: what the boundary between the two stages says that it carries.
    slot: where the value to send lies; handle: where the handle is kept until the WAIT.
    """

    receive: bool
    peer: int
    specs: tuple[Spec, ...]
    slot: int
    handle: int


class Wait(NamedTuple):
    """Operands of WAIT. slot: where a received value is put, -1 for the wait on a sent message."""

    handle: int
    slot: int


class Reduce(NamedTuple):
    """Operands of REDUCE: the rank with the other copy of a stage, and the stage's parameters, in one order on both."""

    peer: int
    parameters: tuple[torch.nn.Parameter, ...]


def forward(run: Executor, op: Compute) -> None:
    inputs, target = run.take(op.read), run.targets[op.microbatch]
    outputs = op.stage.forward(op.microbatch, inputs, target, run.loss_scale, again=op.again)
    if op.write >= 0:
        run.values[op.write] = outputs
    if run.probing:
        run.probes.append((op, [outputs[place].sum(dtype=dtype) for place, dtype in op.probes]))


def backward(run: Executor, op: Compute) -> None:
    gradients = run.take(op.read) if op.read >= 0 else ()
    inputs = op.stage.backward(op.microbatch, gradients, defer=op.defer)
    if op.write >= 0:
        run.values[op.write] = inputs


def weight(run: Executor, op: Compute) -> None:
    op.stage.weight(op.microbatch)


def recompute(run: Executor, op: Compute) -> None:
    op.stage.again(op.microbatch)


def cell(run: Executor, op: Cell) -> None:
    """One after the other: an overlapping version takes this one's place in the table it is bound with."""
    forward(run, op.forward)
    backward(run, op.backward)


def post(run: Executor, batch: tuple[Message, ...]) -> None:
    transfers = []
    for message in batch:
        if message.receive:
            # New ones each time: they become inputs of a stage, which keeps them until its backward.
            tensors = tuple([torch.empty(shape, dtype=dtype, device=run.device) for shape, dtype in message.specs])
        else:
            tensors = run.take(message.slot)
            check_tensors(tensors, message.specs)
        transfers.append(Transfer(message.peer, message.receive, tensors))
    for message, transfer, handle in zip(batch, transfers, run.transport.post(transfers), strict=True):
        run.handles[message.handle] = (handle, transfer.tensors)


def wait(run: Executor, op: Wait) -> bool | None:
    handle, tensors = run.posted(op.handle)
    if run.cooperative and not run.transport.ready(handle):
        return True
    run.transport.wait(handle)
    run.handles[op.handle] = None
    if op.slot >= 0:
        run.values[op.slot] = tensors
    return None


def reduce(run: Executor, op: Reduce) -> None:
    """Exchange this step's weight gradients with the other copy; `add_reduced` adds them when the stream has ended.

    One tensor per dtype travels.
    """
    for group in by_dtype(op.parameters):
        mine = flattened(group)
        theirs = torch.empty_like(mine)
        handles = run.transport.post([Transfer(op.peer, True, (theirs,)), Transfer(op.peer, False, (mine,))])
        run.reducing.append((handles, group, theirs))


def add_reduced(parameters: Sequence[torch.nn.Parameter], theirs: torch.Tensor) -> None:
    """Add the gradients that the other copy has sent."""
    for parameter, part in unflattened(parameters, theirs):
        if parameter.grad is None:
            parameter.grad = part.clone()
        else:
            parameter.grad += part


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
}
"""One handler per kind. SEND and RECV share one: what is posted together is one step of the stream."""


def probes_of(dtypes: Sequence[torch.dtype]) -> tuple[tuple[int, torch.dtype | None], ...]:
    """How to probe outputs of these dtypes: a sum is finite if all of its terms are, and costs the least.

    Of narrow dtypes the sum is in float32, where ordinary values do not overflow.
    """
    return tuple(
        [
            (place, torch.float32 if dtype.itemsize < 4 else None)
            for place, dtype in enumerate(dtypes)
            if dtype.is_floating_point
        ]
    )
