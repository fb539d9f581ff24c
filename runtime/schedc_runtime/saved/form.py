"""The records of a run's checkpoint: a manifest per rank, and one record that commits the step of all ranks.

    runs/7b/step-00001200/rank-0003.safetensors   tensors of a rank, or boxes of them
                          rank-0003.json          `Manifest`
                          commit.json             `Commit`: a step without it does not exist

All of it is JSON, whose values are checked while they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

from schedc_runtime.saved.plain import json_of, sizes
from schedc_runtime.saved.safetensors import ITEM_BYTES

FORM = 1
"""Version of the form. Another version is refused."""
PIECE = 4 << 20
"""A checksum covers this many bytes of a file."""
COMMIT = "commit.json"
_MOST_TEXT = 256 << 20
"""Bytes that a manifest or a record may have."""


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step:08}"


def rank_file(rank: int, suffix: str) -> str:
    """The name of a rank's file: ``safetensors`` or ``json``."""
    return f"rank-{rank:04}.{suffix}"


@dataclass(frozen=True)
class TensorBox:
    """A part of a tensor, as the tensor ``key`` of the rank's file.

    offset, size: by dimension, where the part begins in the whole tensor, and how long it is.
    """

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class TensorInBoxes:
    """A tensor of the whole model, of which this rank has ``boxes``. dtype: by the names of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[TensorBox, ...]


@dataclass(frozen=True)
class Manifest:
    """What a rank has written.

    attempt: tells the writing of a step from an earlier one. bytes: size of the rank's file. crc32: of each `PIECE` of
    the file. tensors: by name in the whole model. facts: JSON of the rank.
    """

    attempt: str
    step: int
    rank: int
    world: int
    bytes: int
    crc32: tuple[int, ...]
    tensors: Mapping[str, TensorInBoxes]
    facts: Mapping[str, Any]

    def text(self) -> str:
        """The manifest as JSON."""
        return _compact({"form": FORM, **asdict(self)})

    @classmethod
    def of_text(cls, text: str) -> Manifest:
        """The manifest of a JSON text. Raises `ValueError` for what `text` would not write."""
        value = _object(text, _TYPES_OF_MANIFEST)
        step, rank, world, length = (_size(value, name) for name in ("step", "rank", "world", "bytes"))
        sums = sizes(value["crc32"])
        if rank >= world or sums is None or max(sums, default=0) >= 1 << 32:
            raise ValueError("the rank or the checksums are out of range")
        if len(sums) != -(-length // PIECE):
            raise ValueError(f"it has {len(sums)} checksums for {length} bytes")
        tensors = {name: tensor_of(name, entry) for name, entry in value["tensors"].items()}
        keys = [box.key for tensor in tensors.values() for box in tensor.boxes]
        if len(set(keys)) < len(keys):
            raise ValueError("two of its boxes are one tensor of the file")
        return cls(value["attempt"], step, rank, world, length, tuple(sums), tensors, value["facts"])


@dataclass(frozen=True)
class Commit:
    """The record that makes a step exist. sha256: of each rank's manifest. facts: JSON of the run."""

    step: int
    sha256: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def world(self) -> int:
        """Number of ranks that have written."""
        return len(self.sha256)

    def text(self) -> str:
        """The record as JSON, with a checksum of itself."""
        plain = {"form": FORM, **asdict(self)}
        return _compact({**plain, "check": crc32(_compact(plain).encode())})

    @classmethod
    def of_text(cls, text: str) -> Commit:
        """The record of a JSON text. Raises `ValueError` for what `text` would not write."""
        value = _object(text, {"step": int, "sha256": list, "facts": dict, "check": int})
        digests = value["sha256"]
        if not digests or not all(isinstance(each, str) and len(each) == 64 for each in digests):
            raise ValueError("a digest is no sha256")
        record = cls(_size(value, "step"), tuple(digests), value["facts"])
        if record.text() != text:
            raise ValueError("the record has changed since it was written")
        return record


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def digest(text: str) -> str:
    """The sha256 of a manifest."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_bytes(path: Path, most: int) -> bytes:
    """What a file holds. Raises `ValueError` for more than ``most`` bytes and for a pipe, `OSError` for a link."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_text(path: Path) -> str:
    """The text of a manifest or a record. Raises as `read_bytes` does."""
    return read_bytes(path, _MOST_TEXT).decode("utf-8")


def covered(shape: tuple[int, ...], boxes: Iterable[TensorBox]) -> bool:
    """Whether ``boxes`` cover a tensor of ``shape``, each element at least once. Equal boxes count once.

    An empty tensor has a box, too.
    """
    distinct = {(box.offset, box.size) for box in boxes}
    if not distinct:
        return False
    left = [((0,) * len(shape), shape)] if prod(shape) else []
    for offset, size in distinct:
        left = [rest for part in left for rest in _without(*part, offset, size)]
    return not left


def _without(
    start: tuple[int, ...], length: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The parts of the box (start, length) that lie outside of the box (offset, size)."""
    ends = [begin + n for begin, n in zip(start, length, strict=True)]
    low = [max(a, b) for a, b in zip(start, offset, strict=True)]
    high = [min(a, b + n) for a, b, n in zip(ends, offset, size, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        yield start, length
        return
    begin, end = list(start), ends
    for axis, (first, last) in enumerate(zip(low, high, strict=True)):
        for one, other in ((begin[axis], first), (last, end[axis])):
            if one < other:
                corner, far = [*begin], [*end]
                corner[axis], far[axis] = one, other
                yield tuple(corner), tuple(b - a for a, b in zip(corner, far, strict=True))
        begin[axis], end[axis] = first, last


_TYPES_OF_MANIFEST = {"attempt": str, "step": int, "rank": int, "world": int, "bytes": int, "crc32": list,
                      "tensors": dict, "facts": dict}  # fmt: skip


def _object(text: str, types: Mapping[str, type]) -> dict[str, Any]:
    """The JSON object of a text with a form, and with exactly the names of ``types``."""
    value = json_of(text)
    if not isinstance(value, dict) or type(value.get("form")) is not int:
        raise ValueError("it is no part of a checkpoint of a run")
    if value.pop("form") != FORM:
        raise ValueError("another version of schedc has written it; read it with that version")
    if {name: type(each) for name, each in value.items()} != types:
        raise ValueError("its entries are not those of a checkpoint of a run")
    return value


def _size(value: Mapping[str, Any], name: str) -> int:
    if not 0 <= value[name] < 1 << 63:
        raise ValueError(f"its {name} is {value[name]}")
    return int(value[name])


def tensor_of(name: str, entry: Any) -> TensorInBoxes:
    """The tensor of a manifest's JSON. Raises `ValueError` for an entry that is none."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, boxes = fields.get("dtype"), sizes(fields.get("shape")), fields.get("boxes")
    if (
        not isinstance(dtype, str)
        or dtype not in ITEM_BYTES
        or shape is None
        or not isinstance(boxes, list)
        or len(fields) != 3
    ):
        raise ValueError(f"`{name}` has no type, shape or boxes")
    return TensorInBoxes(dtype, tuple(shape), tuple(_box(name, shape, box) for box in boxes))


def _box(name: str, shape: list[int], entry: Any) -> TensorBox:
    fields = entry if isinstance(entry, dict) else {}
    key, offset, size = fields.get("key"), sizes(fields.get("offset")), sizes(fields.get("size"))
    if not isinstance(key, str) or offset is None or size is None or not len(offset) == len(size) == len(shape):
        raise ValueError(f"`{name}` has a box that is none")
    if any(first + length > whole for first, length, whole in zip(offset, size, shape, strict=True)):
        raise ValueError(f"`{name}` has a box outside of its shape")
    return TensorBox(key, tuple(offset), tuple(size))
