"""Files of ``torch.save``: a zip archive whose pickle names the tensors, and one stored entry for each storage.

The pickle is read as data, so that nothing in it can run. Values stay in the file until they are wanted.
"""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from schedc_runtime.checkpoint.pickled import ORDERED, Called, Symbol, UnknownName, parse_pickle, pickled_sizes
from schedc_runtime.checkpoint.stored import InFile, InMemory, Stored, copy_rows, reading
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.plain import refused

_INSIDE = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts keep the model's state beside other things."""

_STORAGES = {
    f"torch.{kind}Storage": getattr(torch, name)
    for kind, name in (
        ("Double", "float64"), ("Float", "float32"), ("Half", "float16"), ("BFloat16", "bfloat16"), ("Long", "int64"),
        ("Int", "int32"), ("Short", "int16"), ("Char", "int8"), ("Byte", "uint8"), ("Bool", "bool"),
        ("ComplexFloat", "complex64"), ("ComplexDouble", "complex128"),
    )
} | {"torch.storage.UntypedStorage": torch.uint8}  # fmt: skip
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_REBUILD = "torch._utils._rebuild_"
_PLAIN, _UNTYPED = (f"{_REBUILD}tensor", f"{_REBUILD}tensor_v2"), f"{_REBUILD}tensor_v3"
_PARAMETERS = (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_BESIDE = (
    ORDERED, "collections.Counter", "torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout", "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex",
    *(f"{_REBUILD}{kind}" for kind in ("qtensor", "sparse_tensor", "meta_tensor_no_storage", "nested_tensor")),
)  # fmt: skip
"""What else a training script's file may have beside the state dict, as torch allows it with ``weights_only=True``."""
_KNOWN = frozenset({*_STORAGES, *DTYPES, *_PLAIN, _UNTYPED, *_PARAMETERS, _SUBCLASS, *_BESIDE})


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a file of ``torch.save`` by name: of a state dict, or of the one inside a larger dict.

    Reads no values, unless the file has torch's format from before 1.6: such a file is read whole.
    Raises `MaterializeError` for a file that names anything beside tensors and plain values, or does not hold together.
    """
    with reading(path):
        if not zipfile.is_zipfile(path):
            return {name: InMemory(value) for name, value in _state(_old(path), path).items()}
        with path.open("rb") as file:
            archive = Archive(file, path, 0, path.stat().st_size)
            return {name: archive.tensor(value, name) for name, value in _state(archive.content, path).items()}


def _old(path: Path) -> Any:
    """The content of a file in torch's format from before 1.6."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise UnknownName(name[1]) from None
        raise refused(path, "it is no file of torch.save, or it has more than tensors and plain values") from None


def _state(content: Any, path: Path) -> dict[str, Any]:
    """The mapping from names to tensors inside ``content``."""
    for candidate in (content, *(content.get(key) for key in _INSIDE if isinstance(content, Mapping))):
        if isinstance(candidate, Mapping):
            tensors = [(str(name), value) for name, value in candidate.items() if _is_tensor(value)]
            if len(state := dict(tensors)) < len(tensors):
                raise refused(path, "two of its names differ in their type alone")
            if state:
                return state
    raise MaterializeError(
        f"{path} has no state dict", f"save model.state_dict(), alone or under {' or '.join(_INSIDE)}"
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Called) and value.name.startswith((_REBUILD, _SUBCLASS)))


class Archive:
    """What ``torch.save`` wrote into ``length`` bytes of ``file``, open at ``path``, from byte ``begin`` on.

    content: the saved object, in which a tensor is a `Called`. Whatever does not hold together raises some error.
    """

    def __init__(self, file: BinaryIO, path: Path, begin: int, length: int) -> None:
        self.path, self._begin, self._length = path, begin, length
        self._bytes = io.BufferedReader(_Window(file, begin, length))
        with zipfile.ZipFile(self._bytes) as archive:
            entries = archive.infolist()
            self._entries = {entry.filename: entry for entry in entries}
            pickles = [name for name in self._entries if re.fullmatch(r"[^/]*/data\.pkl", name)]
            if len(self._entries) < len(entries) or len(pickles) != 1:
                raise ValueError("an entry is there twice, or it is no file of torch.save")
            self._folder = pickles[0].removesuffix("data.pkl")
            order = f"{self._folder}byteorder"
            if order in self._entries and archive.read(self._stored(order)) != b"little":
                raise ValueError("its numbers are not little-endian")
            self.content = parse_pickle(archive.read(self._stored(pickles[0])), _KNOWN)

    def tensor(self, record: Any, name: str) -> Stored:
        """The tensor [...] that ``record`` describes, still in the file.

        Raises `MaterializeError` if it is not a plain one, or does not lie in its storage.
        """
        with reading(self.path, name):
            storage, first, shape, strides, dtype = _described(record)
            begin, count, own = self._storage(storage)
            if dtype is None:
                dtype = own
            elif own is not torch.uint8:
                raise ValueError("it has two types")
            shape, strides, (first,) = pickled_sizes(shape), pickled_sizes(strides), pickled_sizes((first,))
            reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
            if 0 not in shape and (first + reach) * dtype.itemsize > count * own.itemsize:
                raise ValueError(f"{list(shape)} does not lie in its storage")
            place = begin + first * dtype.itemsize
            if 0 in shape or strides == _contiguous(shape, strides):
                return InFile(str(self.path), place, shape, dtype, name)
            return Strided(InFile(str(self.path), place, (reach,), dtype, name), shape, strides)

    def _storage(self, record: Any) -> tuple[int, int, torch.dtype]:
        """The first byte in the file of a storage, its number of elements, and their type."""
        what, kind, key, _, count = record.arguments[0]
        if record.name or what != "storage" or not isinstance(kind, Symbol) or not isinstance(key, str):
            raise ValueError("it has no storage")
        entry, dtype = self._stored(f"{self._folder}data/{key}"), _STORAGES[kind.name]
        if pickled_sizes((count,))[0] * dtype.itemsize != entry.file_size:
            raise ValueError(f"its storage has {entry.file_size} bytes in place of {count} x {dtype.itemsize}")
        self._bytes.seek(entry.header_offset)
        header = self._bytes.read(30)
        begin = entry.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        if header[:4] != b"PK\x03\x04" or begin + entry.file_size > self._length:
            raise ValueError("its storage does not lie in the file")
        return self._begin + begin, count, dtype

    def _stored(self, name: str) -> zipfile.ZipInfo:
        """An entry whose bytes lie in the file as they are."""
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise ValueError(f"its entry {name} is compressed")
        return entry


def _described(record: Any) -> tuple[Any, Any, Any, Any, torch.dtype | None]:
    """Storage, first element, shape and strides of a plain tensor, and its type if its storage has none."""
    while record.name in _PARAMETERS or record.name == _SUBCLASS:
        inner = record.arguments[0]
        record = Called(inner.name, record.arguments[2]) if record.name == _SUBCLASS else inner
    if record.name not in (*_PLAIN, _UNTYPED):
        raise ValueError(f"{record.name.removeprefix(_REBUILD)} is no plain tensor")
    storage, first, shape, strides, *more = record.arguments
    dtype = DTYPES[more[2].name] if record.name == _UNTYPED else None
    if any(more[3 if dtype else 2 :]):
        raise ValueError("it is a conjugate or a negative view")
    return storage, first, shape, strides, dtype


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor [...]; those of a dimension of one are as in ``strides``."""
    wanted, row = [], 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        wanted.append(stride if size == 1 else row)
        row *= size
    return tuple(reversed(wanted))


class _Window(io.RawIOBase):
    """``length`` bytes of a file from byte ``begin`` on, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._place = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        place = offset + (0, self._place, self._length)[whence]
        if place < 0:
            raise OSError("a place before the file")
        self._place = place
        return place

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._begin + self._place)
        data = self._file.read(max(0, min(len(buffer), self._length - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


@dataclass(frozen=True)
class Strided:
    """A tensor whose elements do not lie in a row. span: [reach] all elements of the file among which its own are."""

    span: InFile
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.span.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [rows, ...]."""
        span = torch.empty(self.span.shape, dtype=self.dtype)
        self.span.read(span)
        copy_rows(span.as_strided(self.shape, self.strides), target, first)
