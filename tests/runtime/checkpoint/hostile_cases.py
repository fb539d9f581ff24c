"""What tests of checkpoints from strangers share: the error that they expect, values read whole, and files by hand."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError


@contextmanager
def refused(path: Path, *words: str) -> Iterator[None]:
    """The block raises a `MaterializeError` that names ``path`` and ``words``, and repeats no advice of torch."""
    with pytest.raises(MaterializeError) as error:
        yield
    text = "".join(traceback.format_exception(error.value))
    assert "weights_only" not in text
    assert "safe_globals" not in text
    assert [word for word in (str(path), *words) if word not in error.value.message] == []


def values_of(source: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read whole."""
    read = {}
    for name, stored in open_checkpoint(source).items():
        read[name] = torch.empty(stored.shape, dtype=stored.dtype)
        stored.read(read[name])
    return read


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names, types, shapes and bytes."""

    def bytes_of(value: Tensor) -> Any:
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist()

    return {name: bytes_of(value) for name, value in one.items()} == {
        name: bytes_of(value) for name, value in other.items()
    }


def safetensors(path: Path, header: Any, body: bytes = bytes(range(48)), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(shape: Any = (4, 3), begin: Any = 0, end: Any = 48, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
