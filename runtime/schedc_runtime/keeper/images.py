"""An image: one state of a rank in shared memory, as a safetensors file behind a header that is written last.

    0      header    magic, version, flags, sequence, step, lengths, checksum of the description; crc32 of all this
    2048   reader    not 0 while the keeper reads the image
    4096   tensors   a safetensors file
    then             the description: JSON

Whoever writes an image clears its header first. An image without a valid header holds nothing, so that a process that
is killed while it copies leaves no torn state behind. Headers go through system calls, which no copy overtakes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from errno import ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.saved.write import ImageBytes

TENSORS = 4096
"""Byte at which the safetensors file begins."""
_READER = 2048
_FORM = struct.Struct("<8sIIQQQQ32s")
_SUM = struct.Struct("<I")
_MAGIC, _VERSION = b"schedcIM", 1
_DURABLE = 1


class ImageHeader(NamedTuple):
    """What the header of an image says.

    sequence: number of the image among all of its rank. step: number of steps that the state has been trained for.
    durable: whether it shall go to disk. tensors, description: bytes of both. digest: sha256 of the description.
    """

    sequence: int
    step: int
    durable: bool
    tensors: int
    description: int
    digest: bytes

    def packed(self) -> bytes:
        flags = _DURABLE * self.durable
        sizes = (self.sequence, self.step, self.tensors, self.description)
        plain = _FORM.pack(_MAGIC, _VERSION, flags, *sizes, self.digest)
        return plain + _SUM.pack(crc32(plain))

    @classmethod
    def unpacked(cls, content: bytes) -> ImageHeader | None:
        """The header in the first bytes of an image; None if there is no valid one."""
        plain, rest = content[: _FORM.size], content[_FORM.size : _FORM.size + _SUM.size]
        if len(rest) < _SUM.size or _SUM.unpack(rest)[0] != crc32(plain):
            return None
        magic, version, flags, sequence, step, tensors, description, digest = _FORM.unpack(plain)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        return cls(sequence, step, bool(flags & _DURABLE), tensors, description, digest)


class Image:
    """An open image. descriptor: of its file, for reading and writing."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    def made(cls, path: Path, size: int) -> Image:
        """A new image of ``size`` bytes, all of which the system has set aside. An older file of the name is removed.

        Raises `RuntimeFault` where the memory is too small.
        """
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            if error.errno != ENOSPC:
                raise
            raise too_small(path.parent, size) from None
        return cls(path, descriptor)

    @classmethod
    def opened(cls, path: Path) -> Image | None:
        """The image in a file of this user; None where there is no such file."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    def mapped(self) -> mmap.mmap:
        """The memory of the whole file. Its pages are there before the first copy."""
        populate = getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED | populate)

    def clear(self) -> None:
        """Let the image hold nothing, before its memory is written."""
        os.pwrite(self.descriptor, bytes(_FORM.size + _SUM.size), 0)

    def finish(self, sequence: int, step: int, durable: bool, tensors: int, text: bytes) -> None:
        """Say that the memory holds a state now. tensors: bytes of the safetensors file. text: the description."""
        os.pwrite(self.descriptor, text, TENSORS + tensors)
        header = ImageHeader(sequence, step, durable, tensors, len(text), sha256(text).digest())
        os.pwrite(self.descriptor, header.packed(), 0)

    def header(self) -> ImageHeader | None:
        """The header; None if the image holds nothing."""
        header = ImageHeader.unpacked(os.pread(self.descriptor, _FORM.size + _SUM.size, 0))
        fits = header is not None and TENSORS + header.tensors + header.description <= self.size
        return header if fits else None

    def description(self, header: ImageHeader) -> dict[str, Any] | None:
        """What was said of the state under a header; None if it has changed since."""
        text = os.pread(self.descriptor, header.description, TENSORS + header.tensors)
        if sha256(text).digest() != header.digest:
            return None
        value: dict[str, Any] = json.loads(text)
        return value

    def source(self, header: ImageHeader) -> ImageBytes:
        """The safetensors file of the image."""
        return ImageBytes(self.descriptor, TENSORS, header.tensors)

    @property
    def read_now(self) -> bool:
        """Whether a keeper reads the image. A new state may wait for that."""
        return any(os.pread(self.descriptor, 8, _READER))

    @read_now.setter
    def read_now(self, value: bool) -> None:
        os.pwrite(self.descriptor, int(value).to_bytes(8, "little"), _READER)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def too_small(folder: Path, size: int) -> RuntimeFault:
    """The error for a memory that has no ``size`` bytes left."""
    left = os.statvfs(folder)
    return RuntimeFault(
        f"{folder} has {left.f_bavail * left.f_frsize / 1e9:.3f} GB left, and an image of a rank's state takes"
        f" {size / 1e9:.3f} GB, two for each rank",
        "give the container more (docker run --shm-size), or name another folder: Checkpoints(memory=...)",
    )
