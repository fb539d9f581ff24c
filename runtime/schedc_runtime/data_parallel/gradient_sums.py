"""Gradients summed over the replicas of a stage: which parameters travel together, and when their sums start.

A replica is another pipeline that trains the same weights on other batches (`schedc_runtime.ranks.mesh`). The sums of
a stage start right behind the last instruction that computes its weight gradients. A rank waits for them at the end of
its stream, so that they overlap with the work of other stages and pipelines. DDP's hooks would not do: they never see a
deferred weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from schedc.ir.program import InstructionKind
from schedc_runtime.data_parallel.hot_returns import trained_by
from schedc_runtime.execute.code import Call, Code
from schedc_runtime.execute.registers import Registers
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.flat_tensors import by_dtype, flattened, unflattened

if TYPE_CHECKING:
    from schedc_runtime.ranks.mesh import PeerGroups
    from schedc_runtime.transport.collectives import Communicator

BUCKET_BYTES = 25 << 20
"""Gradients that travel together: enough that a collective's start costs nothing, small enough to start early."""


class Bucket(NamedTuple):
    """Parameters of one dtype whose gradients are summed over one communicator, in one tensor."""

    communicator: Communicator
    parameters: tuple[nn.Parameter, ...]


class ReplicaSum(NamedTuple):
    """A bucket whose sum has been started; a `PendingSum`. handle: the communicator's."""

    bucket: Bucket
    handle: Any

    def ready(self) -> bool:
        communicator = self.bucket.communicator
        return not communicator.cooperative or communicator.ready(self.handle)

    def finish(self) -> None:
        """Put the sums over all replicas in place of this replica's gradients."""
        bucket, handle = self
        for parameter, part in unflattened(bucket.parameters, bucket.communicator.wait(handle)):
            parameter.grad = part.clone()


def buckets(parameters: Iterable[nn.Parameter], peer_groups: PeerGroups) -> tuple[Bucket, ...]:
    """The trainable ``parameters``, each in one bucket; those of experts travel among the ranks that hold them."""
    shared: list[nn.Parameter] = []
    own: list[nn.Parameter] = []
    for parameter in parameters:
        if not is_dense_shard(parameter):
            (own if is_expert(parameter) else shared).append(parameter)
    return tuple(
        Bucket(communicator, part)
        for communicator, travelling in ((peer_groups.replicas, shared), (peer_groups.same_experts, own))
        if communicator.size > 1
        for group in by_dtype(travelling)
        for part in _filled(group)
    )


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a part of the experts, of which every rank of an expert group holds another."""
    return bool(getattr(parameter, "expert_parallel", False))


def is_dense_shard(parameter: nn.Parameter) -> bool:
    """Whether a parameter is this replica's shard of one that FSDP2 holds, whose gradients FSDP2 sums."""
    return bool(getattr(parameter, "dense_shard", False))


def _filled(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, ...]]:
    """The parameters in their order, cut where a bucket would exceed `BUCKET_BYTES`."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > BUCKET_BYTES:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield tuple(bucket)


def start_sum(bucket: Bucket) -> ReplicaSum:
    """Send the gradients of a bucket."""
    return ReplicaSum(bucket, bucket.communicator.sum(flattened(bucket.parameters)))


def with_sums(
    code: Code, stages: Mapping[int, Stage], peer_groups: PeerGroups, tied: Iterable[nn.Parameter] = ()
) -> Code:
    """The code of a place with a call behind the last weight gradients of each stage that starts the stage's sums.

    stages: those of the place, by index. What a REDUCE brings together first is summed when the stream has ended: a
    stage with a second copy, and parameters that are ``tied`` to stages of other ranks.
    """
    if peer_groups.replicas.size == 1:
        return code
    last: dict[int, int] = {}  # position of the last step of each stage that computes weight gradients
    copied: set[int] = set()
    for position, step in enumerate(code.steps):
        if step.instruction.kind is InstructionKind.REDUCE and not step.instruction.is_tied:
            copied.add(step.instruction.stage)
        elif (stage := trained_by(step.instruction)) >= 0:
            last[stage] = position
    own = tuple(tied) if any(step.instruction.is_tied for step in code.steps) else ()
    claimed = set(map(id, own))
    after: dict[int, list[Call]] = {}
    final: list[Call] = [(start_sums, buckets(own, peer_groups))] if own else []
    for stage, position in sorted(last.items(), key=lambda item: -item[1]):
        # A parameter that several stages share belongs to the one that is done last.
        parameters = [p for p in stages[stage].module.parameters() if id(p) not in claimed]
        claimed.update(map(id, parameters))
        calls = final if stage in copied else after.setdefault(position, [])
        calls.append((start_sums, buckets(parameters, peer_groups)))
    return replace(code.woven({}, after), final=tuple(final))


def start_sums(registers: Registers, travelling: Sequence[Bucket]) -> None:
    """The call that `with_sums` adds: start the sums of a stage."""
    registers.pending.extend([start_sum(bucket) for bucket in travelling])
