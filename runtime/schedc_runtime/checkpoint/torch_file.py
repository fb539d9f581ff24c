"""Files of ``torch.save``: the names are read with fake tensors, which know where in the file their bytes are."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from schedc_runtime.checkpoint.stored import InFile, InMemory, Stored
from schedc_runtime.errors import MaterializeError

_INSIDE = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts keep the model's state beside other things."""


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a file of ``torch.save`` by name: of a state dict, or of the one inside a larger dict.

    Reads no values, unless the file has torch's format from before 1.6: such a file is read whole.
    """
    if not zipfile.is_zipfile(path):
        return {
            name: InMemory(value) for name, value in _state(torch.load(path, "cpu", weights_only=True), path).items()
        }
    with FakeTensorMode():
        state = _state(torch.load(path, weights_only=True), path)
    return {name: _stored(path, value) for name, value in state.items()}


def _stored(path: Path, value: Any) -> Stored:
    offset = value.untyped_storage()._checkpoint_offset
    if offset is None or not value.is_contiguous():
        return _Mapped(str(path), value)
    place = offset + value.storage_offset() * value.dtype.itemsize
    return InFile(str(path), place, tuple(value.shape), value.dtype)


class _Mapped:
    """A tensor whose elements do not lie in a row: it is taken out of the mapped file."""

    def __init__(self, path: str, fake: Tensor) -> None:
        self.path, self.shape, self.dtype = path, tuple(fake.shape), fake.dtype
        self._view = (fake.storage_offset(), tuple(fake.shape), tuple(fake.stride()))
        storage = fake.untyped_storage()
        self._offset, self._bytes = storage._checkpoint_offset, storage.nbytes()

    def read(self, target: Tensor, first: int = 0) -> None:
        whole = torch.empty(self._bytes // self.dtype.itemsize, dtype=self.dtype)
        InFile(self.path, self._offset or 0, tuple(whole.shape), self.dtype).read(whole)
        offset, size, stride = self._view
        part = whole.as_strided(size, stride, offset)
        target.copy_(part.narrow(0, first, len(target)) if target.dim() else part)


def _state(content: Any, path: Path) -> dict[str, Any]:
    """The mapping from names to tensors inside ``content``."""
    for candidate in (content, *(content.get(key) for key in _INSIDE if isinstance(content, Mapping))):
        if isinstance(candidate, Mapping):
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    raise MaterializeError(
        f"{path} has no state dict", f"save model.state_dict(), alone or under {' or '.join(_INSIDE)}"
    )
