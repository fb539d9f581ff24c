"""Checkpoints of torch.distributed.checkpoint (DCP): a directory whose metadata says where each tensor's parts are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from schedc_runtime.checkpoint.stored import Stored, copy_rows

METADATA = ".metadata"


class _KnownMetadata(FileSystemReader):
    """A reader that reads the metadata once, and not for each tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.metadata


class _InParts:
    """A tensor that lies in the files of a DCP checkpoint."""

    def __init__(self, reader: _KnownMetadata, key: str, entry: TensorStorageMetadata) -> None:
        self.reader, self.key = reader, key
        self.shape, self.dtype = tuple(entry.size), entry.properties.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        direct = tuple(target.shape) == self.shape and target.dtype == self.dtype
        whole = target if direct else torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():  # each rank reads alone, which is meant
            warnings.simplefilter("ignore")
            load({self.key: whole}, storage_reader=self.reader, no_dist=True)
        if not direct:
            copy_rows(whole, target, first)


def stored_in(directory: Path) -> dict[str, Stored]:
    """The tensors of a DCP checkpoint by name; ``model.`` before all names, as training scripts save them, is left out.

    A name that begins so in the model itself is there under both.
    """
    reader = _KnownMetadata(directory)
    entries = reader.metadata.state_dict_metadata
    stored: dict[str, Stored] = {
        key: _InParts(reader, key, entry) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    return {key.removeprefix("model."): value for key, value in stored.items()} | stored
