"""Checkpoints of torch.distributed.checkpoint (DCP): a directory whose metadata says where each tensor's parts are.

The metadata is a pickle. It is read as data, and so are the parts, each a file of ``torch.save`` inside a larger file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.checkpoint.pickled import ORDERED, Called, parse_pickle, pickled_sizes
from schedc_runtime.checkpoint.stored import Stored, inside_file, reading
from schedc_runtime.checkpoint.torch_file import DTYPES, Archive
from schedc_runtime.saved.plain import unique

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint.metadata."
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata."
_TENSOR, _CHUNK, _INDEX = (
    f"{_DCP}{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
)
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_KNOWN = frozenset({
    f"{_DCP}Metadata", _TENSOR, _CHUNK, _INDEX, _PLACE, *DTYPES, ORDERED, "torch.Size",
    *(f"{_DCP}{name}" for name in ("BytesStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{_SHARDED}{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),  # torch before 2.3
    "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath",
    "pathlib._local.WindowsPath",
})  # fmt: skip
"""All that torch's own planners and writers put into a metadata file."""


@dataclass(frozen=True)
class _Part:
    """A part of a tensor: first element, shape, and place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int
    length: int

    def read(self, target: Tensor, first: int, dtype: torch.dtype, name: str) -> None:
        """Write the rows from ``first`` on of the part into ``target`` [rows, ...]."""
        with reading(self.path, name):
            with self.path.open("rb") as file:
                archive = Archive(file, self.path, self.begin, self.length)
                stored = archive.tensor(archive.content, name)
            if (stored.shape, stored.dtype) != (self.sizes, dtype):
                raise ValueError(f"a part is {stored.dtype} {stored.shape} in place of {dtype} {self.sizes}")
        stored.read(target, first)


@dataclass(frozen=True)
class _InParts:
    """A tensor that lies in the files of a DCP checkpoint. parts: they cover it once."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[_Part]

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [rows, ...]. Reads the parts that have some of these rows."""
        for part in self.parts:
            if not self.shape:
                part.read(target, 0, self.dtype, self.name)
                continue
            begin, end = max(first, part.offsets[0]), min(first + len(target), part.offsets[0] + part.sizes[0])
            if begin < end:
                columns = zip(part.offsets[1:], part.sizes[1:], strict=True)
                place = (slice(begin - first, end - first), *(slice(offset, offset + size) for offset, size in columns))
                part.read(target[place], begin - part.offsets[0], self.dtype, self.name)


def stored_in(directory: Path) -> dict[str, Stored]:
    """The tensors of a DCP checkpoint by name; ``model.`` before all names, as training scripts save them, is left out.

    A name that begins so in the model itself is there under both. Raises `MaterializeError` as `stored_as_written`.
    """
    stored = stored_as_written(directory)
    return {key.removeprefix("model."): value for key, value in stored.items()} | stored


def stored_as_written(directory: Path) -> dict[str, Stored]:
    """The tensors of a DCP checkpoint by the names that it has.

    Raises `MaterializeError` for metadata with anything beside what torch writes, and for parts that lie outside of the
    directory, overlap, or leave something out.
    """
    path = directory / METADATA
    with reading(path):
        metadata = _state(parse_pickle(path.read_bytes(), _KNOWN), f"{_DCP}Metadata")
        places = unique(_places(metadata["storage_data"]))
        lengths: dict[str, tuple[Path, int]] = {}
        stored: dict[str, Stored] = {}
        for name, entry in metadata["state_dict_metadata"].items():
            if isinstance(name, str) and isinstance(entry, Called) and entry.name == _TENSOR:
                with reading(path, name):
                    stored[name] = _tensor(name, _state(entry, _TENSOR), places, directory, lengths)
    return stored


def _state(record: Any, name: str) -> Mapping[str, Any]:
    """The fields of a dataclass ``name`` in a pickle."""
    if not isinstance(record, Called) or record.name != name or not isinstance(record.state, Mapping):
        raise ValueError(f"{name.rpartition('.')[2]} is missing")
    return record.state


def _places(storage: Any) -> Iterator[tuple[tuple[str, tuple[int, ...]], Mapping[str, Any]]]:
    """Where each part of each tensor is, by name and first element."""
    for index, place in storage.items():
        field = _state(index, _INDEX)
        if field.get("offset") is not None:  # else it is no tensor
            yield (field["fqn"], pickled_sizes(field["offset"])), _state(place, _PLACE)


def _tensor(
    name: str, entry: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]], directory: Path,
    lengths: dict[str, tuple[Path, int]],
) -> _InParts:  # fmt: skip
    """The tensor ``name``. lengths: path and bytes of each file of the metadata so far."""
    shape, dtype = pickled_sizes(entry["size"]), DTYPES[entry["properties"].state[0].name]
    parts: dict[Any, _Part] = {}  # a part that several ranks have is named once by some versions, and twice by others
    for chunk in entry["chunks"]:
        offsets, extent = (pickled_sizes(_state(chunk, _CHUNK)[key]) for key in ("offsets", "sizes"))
        if 0 in extent:
            continue
        place = places[name, offsets]
        file, begin, length = place["relative_path"], place["offset"], place["length"]
        if place.get("transform_descriptors"):
            raise ValueError(f"its parts are transformed by {place['transform_descriptors']}, which is not supported")
        if file not in lengths:
            path = inside_file(directory, file)
            lengths[file] = path, path.stat().st_size
        path, size = lengths[file]
        if sum(pickled_sizes((begin, length))) > size:
            raise ValueError(f"a part ends at byte {begin + length} of {file}, which has {size}")
        parts[offsets, extent] = _Part(offsets, extent, path, begin, length)
    _check_cover(shape, [*parts.values()])
    return _InParts(name, shape, dtype, [*parts.values()])


def _check_cover(shape: tuple[int, ...], parts: Sequence[_Part]) -> None:
    """Raise `ValueError` unless the parts cover ``shape`` and do not overlap."""
    for part in parts:
        if not all(offset + size <= whole for offset, size, whole in zip(part.offsets, part.sizes, shape, strict=True)):
            raise ValueError(f"a part of it lies outside of {list(shape)}")
    if sum(prod(part.sizes) for part in parts) != prod(shape) or _overlaps(shape, parts):
        raise ValueError(f"its parts do not cover {list(shape)} once")


def _overlaps(shape: tuple[int, ...], parts: Sequence[_Part]) -> bool:
    """Whether two of the parts, none of them empty, have an element in common."""
    if len(parts) < 2 or not shape:
        return len(parts) > 1
    along = max(range(len(shape)), key=lambda dim: len({part.offsets[dim] for part in parts}))
    boxes = sorted(
        ([(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True)] for part in parts),
        key=lambda box: box[along],
    )
    for number, box in enumerate(boxes):
        for other in islice(boxes, number + 1, None):
            if other[along][0] >= box[along][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)):
                return True
    return False
