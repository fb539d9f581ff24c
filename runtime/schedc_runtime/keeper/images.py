"""An image: one state of a rank in shared memory, as a safetensors file behind a header that is written last.

    0      header    magic, version, flags, sequence, step, lengths, checksum of the description; crc32 of all this
    2048   reader    not 0 while the keeper reads the image
    3072   backed    header of the state that another node holds, too
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
from collections.abc import Collection, Mapping
from errno import ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.saved.safetensors import FileSpan
from schedc_runtime.saved.write import ImageBytes

TENSORS = 4096
"""Byte at which the safetensors file begins."""
_READER, _BACKED = 2048, 3072
_FORM = struct.Struct("<8sIIQQQQ32s")
_SUM = struct.Struct("<I")
_MAGIC, _VERSION = b"schedcIM", 1
_DURABLE, _COPY = 1, 2


class ImageHeader(NamedTuple):
    """What the header of an image says.

    sequence: number of the image among all of its rank. step: number of steps that the state has been trained for.
    durable: whether it shall go to disk. tensors, description: bytes of both. digest: sha256 of the description.
    copy: whether it came from another node. Tensors that lie on several nodes are holes then.
    """

    sequence: int
    step: int
    durable: bool
    tensors: int
    description: int
    digest: bytes
    copy: bool = False

    @property
    def original(self) -> ImageHeader:
        """The header as the rank has written it, on whichever node the image is."""
        return self._replace(copy=False)

    def packed(self) -> bytes:
        flags = _DURABLE * self.durable | _COPY * self.copy
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
        return cls(sequence, step, bool(flags & _DURABLE), tensors, description, digest, bool(flags & _COPY))


class Image:
    """An open image. descriptor: of its file, for reading and writing."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    def made(cls, path: Path, size: int, whole: bool = True) -> Image:
        """A new image of ``size`` bytes, all of which the system has set aside. An older file of the name is removed.

        whole: otherwise memory is taken as bytes are written, by `write` alone.
        Raises `RuntimeFault` where the memory is too small.
        """
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        image = cls(path, descriptor)
        try:
            os.truncate(descriptor, size)
            if whole:
                image.reserve()
        except BaseException:
            image.close()
            path.unlink()
            raise
        return image

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

    def reserve(self) -> None:
        """Let the system set all bytes aside. Raises `RuntimeFault` where the memory is too small."""
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            raise too_small(self.path.parent, self.size) from None

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
        self.put(ImageHeader(sequence, step, durable, tensors, len(text), sha256(text).digest()))

    def put(self, header: ImageHeader) -> None:
        """Say that the memory holds the state of a header."""
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

    def read(self, begin: int, length: int) -> bytes:
        """Bytes of the file. Raises `OSError` where it ends before."""
        content = os.pread(self.descriptor, length, begin)
        if len(content) < length:
            raise OSError(f"{self.path} ends before byte {begin + length}")
        return content

    def write(self, content: bytes, begin: int) -> None:
        """Write bytes of the file. Raises `RuntimeFault` where the memory is too small for them."""
        view = memoryview(content)
        try:
            while view:
                written = os.pwrite(self.descriptor, view, begin)
                view, begin = view[written:], begin + written
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            raise too_small(self.path.parent, self.size) from None

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

    def note_backed(self, header: ImageHeader) -> None:
        """Say that another node holds the state of a header, too."""
        os.pwrite(self.descriptor, header.packed(), _BACKED)

    @property
    def backed(self) -> bool:
        """Whether another node holds the state of this image, too."""
        header = self.header()
        length = _FORM.size + _SUM.size
        return header is not None and os.pread(self.descriptor, length, _BACKED) == header.packed()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def parts_besides(spans: Mapping[str, FileSpan], keys: Collection[str], tensors: int) -> list[tuple[int, int]]:
    """[(begin, length)] the bytes of an image's safetensors file, without those of ``keys``. tensors: bytes of it."""
    parts, begin = list[tuple[int, int]](), TENSORS
    for key, span in sorted(spans.items(), key=lambda item: item[1].begin):
        if key in keys:
            parts += [(begin, span.begin - begin)] * (span.begin > begin)
            begin = span.end
    return [*parts, (begin, TENSORS + tensors - begin)] if TENSORS + tensors > begin else parts


def too_small(folder: Path, size: int) -> RuntimeFault:
    """The error for a memory that has no ``size`` bytes left."""
    left = os.statvfs(folder)
    return RuntimeFault(
        f"{folder} has {left.f_bavail * left.f_frsize / 1e9:.3f} GB left, and an image of a rank's state takes"
        f" {size / 1e9:.3f} GB, two for each rank",
        "give the container more (docker run --shm-size), or name another folder: Checkpoints(memory=...)",
    )
