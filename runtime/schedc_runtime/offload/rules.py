"""Says which of the tensors that autograd saves may leave the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from schedc_runtime.offload.account import Reason
from schedc_runtime.offload.lanes import Lanes

WHOLE, LOSS, INPUT = -1, -2, -3
"""Numbers of what saves tensors and is no node: a stage that runs as a whole, the loss, inputs kept for an R."""
NAMES = {WHOLE: "the stage", LOSS: "the loss", INPUT: "the input"}


@dataclass(frozen=True)
class OffloadSettings:
    """What of a stage moves, and on which lanes.

    lanes: those of the rank. least: bytes below which a storage stays; None for `least_copy` of the device.
    roles: segments of these roles move, such as ``experts``; empty for all.
    microbatches: numbers that move; None for all. slices: of each microbatch, which move together.
    """

    lanes: Lanes
    least: int | None = None
    roles: frozenset[str] = frozenset()
    microbatches: frozenset[int] | None = None
    slices: int = 1


@dataclass
class Rules:
    """What may leave the device, for all microbatches of one stage.

    nodes: by number, the role of each segment.
    """

    module: nn.Module
    least: int
    roles: Collection[str]
    nodes: Mapping[int, str]
    _own: set[int] | None = None
    _elsewhere: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages that somebody else held when they had moved."""

    def refusal(self, node: int, tensor: Tensor, device: torch.device) -> Reason | None:
        """Why a tensor [...] that ``node`` saves stays on ``device``; None if it may leave."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return Reason.FORM
        if tensor.device != device or tensor.is_conj() or tensor.is_neg():
            return Reason.FORM
        if self.roles and self.nodes.get(node, "") not in self.roles:
            return Reason.ROLE
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex or dtype.itemsize == 1):
            return Reason.INDEX
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.least):
            return Reason.SMALL
        return Reason.HELD if storage._cdata in self._elsewhere else None

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] lies in the storage of a parameter or a buffer of the stage."""
        if self._own is None:
            self._own = set(_storages([*self.module.parameters(), *self.module.buffers()]))
        return isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in self._own

    def is_held(self, weak: StorageWeakRef) -> None:
        """Leave this storage out from now on: others hold it."""
        self._elsewhere[weak.cdata] = weak

    def forget(self) -> None:
        """A step is over: parameters may lie elsewhere in the next one."""
        self._own = None
        self._elsewhere = {
            number: weak
            for number, weak in self._elsewhere.items()
            if not weak.expired()  # type: ignore[no-untyped-call]
        }


def _storages(tensors: Iterable[Tensor]) -> Iterable[int]:
    for tensor in tensors:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            yield tensor.untyped_storage()._cdata
