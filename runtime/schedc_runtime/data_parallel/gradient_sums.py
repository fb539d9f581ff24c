"""Gradients summed over the replicas of a stage: which parameters travel together, and the two halves of their sums.

A replica is another pipeline that trains the same weights on other batches (`schedc_runtime.ranks.mesh`).

    SCATTER START   behind the stage's last weight gradients    an all-to-all of shares leaves
    SCATTER JOIN    later                                       each member adds up its share, in the order of members
    SPREAD  START   right behind                                an all-gather of the sums leaves
    SPREAD  JOIN    the end of the stream                       the sums take the place of the gradients

DDP's hooks would not do: they never see a deferred weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from schedc_runtime.transport.collective_calls import whole_of
from schedc_runtime.transport.flat_tensors import by_dtype, flattened, unflattened

if TYPE_CHECKING:
    from schedc_runtime.transport.collective_calls import Communicator

BUCKET_BYTES = 25 << 20
"""Gradients that travel together: enough that a collective's start costs nothing, small enough to start early."""


class Bucket(NamedTuple):
    """Parameters of equal dtype whose gradients are summed in one tensor, over one communicator."""

    communicator: Communicator
    parameters: tuple[nn.Parameter, ...]


class SumUnderWay(NamedTuple):
    """A bucket, half of whose sum is on its way. handle: the communicator's. elements: those of the sum.

    own: [parameters] whether this replica has a gradient.
    """

    bucket: Bucket
    handle: Any
    elements: int
    own: Sequence[bool]


class StageSums:
    """The sums of a stage's gradients over groups of replicas, a bucket at a time.

    parameters: those of the stage, trained or not; the trained ones travel. communicator: the replicas that sum them.
    experts: the replicas that sum gradients of experts; by default ``communicator``.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], communicator: Communicator, experts: Communicator | None = None
    ) -> None:
        self.parameters, self.communicator, self.experts = tuple(parameters), communicator, experts or communicator
        self._trained: list[bool] | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._under_way: list[SumUnderWay] = []

    @property
    def travel(self) -> bool:
        """Whether other ranks sum any of the parameters, once they are trained."""
        return any(parts and group.size > 1 for parts, group in self._parts())

    def _parts(self) -> Iterator[tuple[list[nn.Parameter], Communicator]]:
        """The parameters of experts and the others, each with the replicas that sum them."""
        yield [p for p in self.parameters if is_expert(p)], self.experts
        yield [p for p in self.parameters if not is_expert(p)], self.communicator

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What travels together now: parameters may be frozen and trained again between steps."""
        trained = [parameter.requires_grad for parameter in self.parameters]
        if trained != self._trained:
            travelling = (buckets(part, group) for part, group in self._parts() if group.size > 1)
            self._trained, self._buckets = trained, tuple(bucket for part in travelling for bucket in part)
        return self._buckets

    def reset(self) -> None:
        """Forget the step."""
        self._under_way = []

    def start_scatter(self) -> int:
        """Send each member its share of this step's gradients; returns the bytes of the gradients."""
        size = 0
        for bucket in self.buckets:
            own = [parameter.grad is not None for parameter in bucket.parameters]
            flat = flattened(bucket.parameters)
            handle = bucket.communicator.reduce_scatter(flat)
            self._under_way.append(SumUnderWay(bucket, handle, flat.numel(), own))
            size += sum(parameter.nbytes for parameter in bucket.parameters)
        return size

    def ready(self) -> bool:
        """Whether the next join would not block; always true unless replicas share a process."""
        return all(
            not each.bucket.communicator.cooperative or each.bucket.communicator.ready(each.handle)
            for each in self._under_way
        )

    def join_scatter(self) -> None:
        """Add up this member's shares, and keep them for `start_spread`."""
        self._under_way = [each._replace(handle=each.bucket.communicator.wait(each.handle)) for each in self._under_way]

    def start_spread(self) -> int:
        """Send every member this member's shares of the sums; returns the bytes of the sums."""
        self._under_way = [
            each._replace(handle=each.bucket.communicator.all_gather(each.handle)) for each in self._under_way
        ]
        return sum(parameter.nbytes for bucket in self.buckets for parameter in bucket.parameters)

    def join_spread(self) -> None:
        """Put the sums over all replicas in place of this replica's gradients."""
        for bucket, handle, elements, own in self._under_way:
            flat = whole_of(bucket.communicator.wait(handle), elements)
            for parameter, part in unflattened(bucket.parameters, flat, own):
                parameter.grad = part.clone()
        self._under_way = []


def buckets(parameters: Iterable[nn.Parameter], communicator: Communicator) -> tuple[Bucket, ...]:
    """The trainable ``parameters``, each in one bucket, in which it travels over ``communicator``."""
    return tuple(Bucket(communicator, part) for group in by_dtype(parameters) for part in _filled(group))


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a part of the experts, of which every rank of an expert group holds another."""
    return bool(getattr(parameter, "expert_parallel", False))


def is_part(parameter: nn.Parameter) -> bool:
    """Whether other ranks with the same stage hold other parts: of the experts, or of a split product."""
    return is_expert(parameter) or getattr(parameter, "tensor_parallel", None) is not None


def is_summed_among_same(parameter: nn.Parameter) -> bool:
    """Whether only ranks with the same part sum its gradients: tensor ranks have parts, or whole gradients already."""
    return is_part(parameter) or bool(getattr(parameter, "tensor_complete", False))


def is_dense_shard(parameter: nn.Parameter) -> bool:
    """Whether a parameter is this replica's shard of a dense part. The sharding sums the gradient."""
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
