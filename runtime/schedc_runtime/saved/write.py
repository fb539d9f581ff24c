"""Writes a checkpoint of a run: a rank's file and manifest, then the record that commits the step of all ranks.

Each file is written under another name, brought to the disk and then renamed. Whoever is killed in between leaves a
step that does not exist, or the whole step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol
from zlib import crc32

from schedc_runtime.saved.form import (
    COMMIT,
    PIECE,
    Commit,
    Manifest,
    TensorInBoxes,
    digest,
    rank_file,
    read_text,
    step_folder,
)


class ByteSource(Protocol):
    """A safetensors file of ``length`` bytes that lies elsewhere."""

    @property
    def length(self) -> int: ...

    def read(self, begin: int, length: int) -> bytes:
        """Bytes ``begin`` ..< ``begin + length``, all of which are there."""


class ImageBytes(NamedTuple):
    """A safetensors file inside of another: ``length`` bytes from ``first`` on of an open file."""

    descriptor: int
    first: int
    length: int

    def read(self, begin: int, length: int) -> bytes:
        """As `ByteSource.read`. Raises `OSError` for a file that ends too early."""
        pieces = []
        while length:
            piece = os.pread(self.descriptor, length, self.first + begin)
            if not piece:
                raise OSError(f"the source ends {length} bytes too early")
            pieces.append(piece)
            begin, length = begin + len(piece), length - len(piece)
        return b"".join(pieces)


def write_rank(
    root: Path,
    attempt: str,
    step: int,
    rank: int,
    world: int,
    source: ByteSource,
    tensors: Mapping[str, TensorInBoxes],
    facts: Mapping[str, Any],
    valid: Callable[[], bool] = lambda: True,
) -> Manifest | None:
    """Write a rank's file of a step, and its manifest behind it. What the rank wrote before under these names is lost.

    attempt: the same on all ranks that write a step together, and another one each time. valid: asked after each piece
    whether the source still has what it had. If not, nothing stays, and None comes back.
    Raises `FileExistsError` for a step that is committed, and `OSError` where the disk is full or refuses. The
    rank has no manifest then.
    """
    folder = step_folder(root, step)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / COMMIT).exists():
        raise FileExistsError(f"step {step} is committed in {folder}")
    (folder / rank_file(rank, "json")).unlink(missing_ok=True)
    sync_folder(root)
    partial = folder / f"{rank_file(rank, 'safetensors')}.partial"
    try:
        sums = _copy(source, partial, valid)
        if sums is None:
            return None
        partial.rename(folder / rank_file(rank, "safetensors"))
        sync_folder(folder)
        manifest = Manifest(attempt, step, rank, world, source.length, tuple(sums), tensors, facts)
        write_whole(folder / rank_file(rank, "json"), manifest.text())
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def commit(root: Path, attempt: str, step: int, world: int, facts: Mapping[str, Any]) -> Commit | None:
    """Commit a step once the manifests of all ranks are there; None while one is missing, or is of another attempt."""
    folder = step_folder(root, step)
    digests = []
    for rank in range(world):
        path = folder / rank_file(rank, "json")
        if not path.is_file():
            return None
        text = read_text(path)
        manifest = Manifest.of_text(text)
        if (manifest.attempt, manifest.step, manifest.rank, manifest.world) != (attempt, step, rank, world):
            return None
        digests.append(digest(text))
    record = Commit(step, tuple(digests), facts)
    write_whole(folder / COMMIT, record.text())
    return record


def take_back(root: Path, step: int, ranks: Iterable[int]) -> None:
    """Remove what ``ranks`` have written of a step, unless it is committed, as far as the disk allows."""
    folder = step_folder(root, step)
    if (folder / COMMIT).exists():
        return
    with suppress(OSError):
        for rank in ranks:
            (folder / rank_file(rank, "json")).unlink(missing_ok=True)
            (folder / rank_file(rank, "safetensors")).unlink(missing_ok=True)
        folder.rmdir()


def clear(root: Path, keep: int) -> list[int]:
    """Remove all but the ``keep`` newest committed steps, and what never was committed before these; returns the steps.

    A commit record goes before the files that it commits.
    """
    folders = sorted((step, path) for path in root.glob("step-*") if (step := step_of_folder(path)) is not None)
    committed = [step for step, path in folders if (path / COMMIT).is_file()]
    if len(committed) < keep or not keep:
        return []
    oldest = committed[-keep]
    removed = [(step, path) for step, path in folders if step < oldest]
    for _, path in removed:
        (path / COMMIT).unlink(missing_ok=True)
        sync_folder(path)
        shutil.rmtree(path, ignore_errors=True)
    return [step for step, _ in removed]


def step_of_folder(path: Path) -> int | None:
    """The step of a folder, by its name."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 and path.is_dir() else None


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole, or as before. Raises `OSError`."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is at ``path`` on the disk behind the block. Where the block fails, all is as before."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, as far as its file system does so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(source: ByteSource, target: Path, valid: Callable[[], bool]) -> list[int] | None:
    """Copy the source piece by piece and bring it to the disk. Returns checksums; None if the source has changed."""
    sums = []
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for begin in range(0, source.length, PIECE):
            piece = source.read(begin, min(PIECE, source.length - begin))
            if not valid():
                return None
            sums.append(crc32(piece))
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sums
