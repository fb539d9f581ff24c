"""Notes in place of tensors that autograd saves: a tensor that is held, or a view of a result that is not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from schedc_runtime.errors import StageError
from schedc_runtime.offload.boxes import unwritten


class Producer:
    """The origin of results that are not held. For an exchange: they come when its rows are sent a second time."""

    __slots__ = ("__weakref__", "name", "results")

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: tuple[Tensor, ...] | None = None

    def result(self, index: int) -> Tensor:
        self.fill()
        assert self.results is not None
        return self.results[index]

    def fill(self) -> None:
        if self.results is None:
            raise StageError(
                f"the backward needs what {self.name} brought, which has not been sent a second time",
                "let the cell program run the `again` steps of its stage before their backward",
            )


class TensorNote(NamedTuple):
    """A tensor of any shape that is held. version: of the storage at the save; a later write raises the version."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        return unwritten(self.tensor, self.version)


class RegionOutput(NamedTuple):
    """A view of a tensor that a region or an exchange returned.

    output: index of the tensor among the results. size: [dimensions] shape of the view. stride: [dimensions].
    offset: elements of storage from the beginning of the result to that of the view.
    """

    producer: Producer
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        result = self.producer.result(self.output)
        return result.as_strided(self.size, self.stride, result.storage_offset() + self.offset)
