"""Operands of instructions: what a handler is given beside the registers, worked out once when a stream is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from schedc.cell.graph import StageShape
from schedc.ir.ops import OpKind
from schedc.ir.program import Instruction, InstructionKind
from schedc.ir.works import FACTS as WORK_FACTS
from schedc.ir.works import WorkGroup, WorkKind, Works
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.transport.base import MessageForm


class CallsOfRun(Protocol):
    """What a stage gives for one run of a stream (`schedc_runtime.stage.written_whole.StageCalls`)."""

    @property
    def F(self) -> Callable[[int, Sequence[Tensor], Any, float], tuple[Tensor, ...]]:
        """F without a later R, with tensors in the shapes of the boundaries."""
        ...

    @property
    def B(self) -> Callable[[int, Sequence[Tensor | None]], tuple[Tensor, ...]]:
        """B, with gradients in the shapes of the boundaries."""
        ...


class ComputeStage(Protocol):
    """What handlers ask of a stage; `schedc_runtime.stage.stage.Stage` says what each method does.

    Inputs, outputs and gradients have the shapes of the stage's boundaries.
    """

    index: int
    module: torch.nn.Module

    @property
    def shape(self) -> StageShape | None:
        """The graph on which a microbatch runs in micro-steps; None for a stage that runs as a whole."""
        ...

    @property
    def shape_with_r(self) -> StageShape | None: ...

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], target: Any, loss_scale: float, *, recompute_later: bool
    ) -> tuple[Tensor, ...]: ...

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None], *, defer: bool
    ) -> tuple[Tensor, ...]: ...

    def calls_of_run(self) -> CallsOfRun: ...

    def weight(self, microbatch: int) -> None: ...

    def recompute(self, microbatch: int) -> None: ...


class ComputeOperands(NamedTuple):
    """Operands of F, I, W, B and R.

    read: slot of the value consumed: the inputs of a forward, the gradients of the outputs of a backward; -1 for none.
    write: slot of the value produced: the outputs of a forward, the gradients of the inputs of a backward; -1 for none.
    defer: whether a backward leaves the weight gradients to a W.
    probes: positions of a forward's floating outputs, and the options with which to sum each (`probes_of`).
    recomputed: whether the microbatch has an R between its forward and its backward.
    """

    stage: ComputeStage
    microbatch: int
    read: int
    write: int
    defer: bool
    probes: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    recomputed: bool = False

    @property
    def cut(self) -> Any:
        """The stage, which runs in micro-steps."""
        return self.stage


class PairOperands(NamedTuple):
    """Operands of CELL: both ops, and their kinds."""

    first: ComputeOperands
    second: ComputeOperands
    kinds: tuple[OpKind, OpKind]


class MessageOperands(NamedTuple):
    """Operands of one SEND or RECV of a posted batch.

    edge: position of the message's form among the executor's forms (`message_forms`).
    slot: where the value to send lies. handle: where the transport's handle is kept until the WAIT. communicator: as of
    a `Transfer`.
    """

    receive: bool
    peer: int
    edge: int
    slot: int
    handle: int
    communicator: int = -1


class WaitOperands(NamedTuple):
    """Operands of WAIT. slot: where a received value is put; -1 for the wait on a sent message."""

    handle: int
    slot: int


class MovingStage(Protocol):
    """What works ask of a stage (`schedc_runtime.stage.offloaded.OffloadedStage`)."""

    index: int

    def start_offload(self, microbatch: int) -> int: ...

    def join_offload(self, microbatch: int) -> int: ...

    def start_fetch(self, microbatch: int) -> int: ...

    def join_fetch(self, microbatch: int) -> None: ...

    def start_snapshot(self) -> int: ...

    def join_snapshot(self) -> None: ...


class ReplicatedStage(Protocol):
    """What works among replicas ask of a stage (`schedc_runtime.data_parallel.stage_replicas.StageReplicas`)."""

    index: int

    @property
    def members(self) -> int: ...

    def ready(self) -> bool: ...

    def start_gather(self) -> int: ...

    def join_gather(self) -> None: ...

    def drop(self) -> None: ...

    def start_scatter(self) -> int: ...

    def join_scatter(self) -> None: ...

    def start_spread(self) -> int: ...

    def join_spread(self) -> None: ...


class ReplicaKey(NamedTuple):
    """The sums of a stage in a group of replicas. late: whether a REDUCE sums the gradients before."""

    stage: int
    group: int
    late: bool


def replica_keys(stream: Sequence[Instruction], works: Works) -> dict[int, ReplicaKey]:
    """The sums that each work among replicas in a rank's stream is about, by the number of the work.

    A SCATTER that starts behind a REDUCE is late. SPREADs follow the joins of their SCATTERs in order.
    """
    keys: dict[int, ReplicaKey] = {}
    joined: dict[tuple[int, int], list[bool]] = {}
    late = False
    for x in stream:
        late = late or x.kind is InstructionKind.REDUCE
        if x.work < 0 or not WORK_FACTS[(work := works.work(x.work)).kind].of_stage:
            continue
        place = work.stage, max(int(work.group), int(WorkGroup.REPLICAS))
        if x.kind is InstructionKind.JOIN:
            if work.kind is WorkKind.SCATTER:
                joined.setdefault(place, []).append(keys[x.work].late)
        elif work.kind is WorkKind.SPREAD:
            keys[x.work] = ReplicaKey(*place, joined[place].pop(0))
        else:
            keys[x.work] = ReplicaKey(*place, late and work.kind is WorkKind.SCATTER)
    return keys


class WorkOperands(NamedTuple):
    """Operands of START and JOIN.

    kind, lane: their names in programs. microbatch: -1 for the whole stage. work: the number of the work, the same in
    its START and JOIN. bytes: as the program says; -1 where it does not. after_sums: whether the work takes gradients
    that REDUCEs before it sum. group: which replicas take part (`schedc.ir.works.WorkGroup`).
    """

    kind: str
    lane: str
    stage: MovingStage | ReplicatedStage
    microbatch: int
    work: int
    bytes: float = -1.0
    after_sums: bool = False
    group: int = -1


class ReduceOperands(NamedTuple):
    """Operands of REDUCE: the rank with the other copy of a stage, and the parameters, in one order on both ranks."""

    peer: int
    parameters: tuple[torch.nn.Parameter, ...]


def message_forms(boundaries: Sequence[Boundary]) -> tuple[MessageForm, ...]:
    """[2 * (stages + 1)] what a message carries: activations over each boundary, then gradients.

    They alone change with the input signature: bound code has positions in them.
    """
    carried = [boundary.tensors for boundary in boundaries] + [boundary.gradients for boundary in boundaries]
    return tuple([MessageForm([(spec.shape, spec.dtype) for spec in tensors]) for tensors in carried])


def probes_of(dtypes: Sequence[torch.dtype]) -> tuple[tuple[int, Mapping[str, Any]], ...]:
    """How to probe outputs of these dtypes: a sum is finite if all its terms are, and costs the least.

    Narrow dtypes are summed in float32, where ordinary values do not overflow.
    """
    return tuple(
        [
            (position, {"dtype": torch.float32} if dtype.itemsize < 4 else {})
            for position, dtype in enumerate(dtypes)
            if dtype.is_floating_point
        ]
    )
