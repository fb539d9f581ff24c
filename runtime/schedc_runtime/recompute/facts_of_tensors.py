"""Facts of tensors that a recorder goes by: their storages, whether they are parameters, and autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def storage_number(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def autocast_of(tensors: Sequence[Tensor]) -> tuple[str, bool, torch.dtype]:
    """(device type, whether on, dtype) of autocast during a call; the backward's thread may have other settings."""
    device = tensors[0].device.type if tensors else "cpu"
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
