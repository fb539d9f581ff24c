"""Facts of tensors for a recorder: storages, parameters, and autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A reference that does not hold the storage [bytes]; its number is not used again while the reference lives."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def storage_number(tensor: Tensor) -> int:
    """The number of the storage of a tensor [...]."""
    number: int = tensor.untyped_storage()._cdata
    return number


def is_parameter_use(tensor: Tensor) -> bool:
    """Whether a tensor [...] is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def autocast_of(tensors: Sequence[Tensor]) -> tuple[str, bool, torch.dtype]:
    """(device type, whether on, dtype) of autocast during a call with ``tensors`` [...].

    The backward's thread may have other settings.
    """
    device = tensors[0].device.type if tensors else "cpu"
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
