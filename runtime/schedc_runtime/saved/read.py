"""Reads checkpoints of a run: the committed steps, their tensors, and whether a byte has changed since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import (
    COMMIT,
    PIECE,
    Commit,
    Manifest,
    TensorBox,
    TensorInBoxes,
    covered,
    digest,
    rank_file,
    read_text,
    step_folder,
)
from schedc_runtime.saved.plain import refused
from schedc_runtime.saved.safetensors import FileSpan, spans_in
from schedc_runtime.saved.write import step_of_folder


class Flaw(NamedTuple):
    """A fault of a committed step. piece: number of a 4 MiB piece of the file, or -1. tensors: in that piece."""

    path: Path
    why: str
    piece: int = -1
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f", 4 MiB piece {self.piece}" if self.piece >= 0 else ""
        held = f" (in it {', '.join(f'`{name}`' for name in self.tensors[:3])}" if self.tensors else ""
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{self.path}{where}: {self.why}{held}{more}{')' if held else ''}"


class Holding(NamedTuple):
    """A box of a tensor, and the file and the bytes that hold it."""

    path: Path
    box: TensorBox
    span: FileSpan


HeldTensors = dict[str, tuple[TensorInBoxes, tuple[Holding, ...]]]
"""By name: a tensor, and each box of it on any rank."""


@dataclass(frozen=True)
class SavedStep:
    """A committed step, of which the records have been read and no tensor."""

    folder: Path
    commit: Commit
    manifests: tuple[Manifest, ...]

    @property
    def step(self) -> int:
        return self.commit.step

    @property
    def bytes(self) -> int:
        """Bytes of all files with tensors."""
        return sum(manifest.bytes for manifest in self.manifests)

    @cached_property
    def tensors(self) -> HeldTensors:
        """By name: the tensor as one rank's manifest has it, and each box of it on any rank.

        Reads the headers of all files. Raises `MaterializeError` for a file that is not as its manifest says.
        """
        files = ((self.folder / rank_file(each.rank, "safetensors"), each) for each in self.manifests)
        return joined_boxes(self.folder, ((path, each.tensors, _spans(path, each)) for path, each in files))


def joined_boxes(
    folder: Path, files: Iterable[tuple[Path, Mapping[str, TensorInBoxes], Mapping[str, FileSpan]]]
) -> HeldTensors:
    """The tensors of all ranks by name. files: by rank, the path, the tensors of a manifest, and the spans by key.

    Raises `MaterializeError` where ranks have a tensor with other shapes, or none has some part of it.
    """
    found: dict[str, tuple[TensorInBoxes, list[Holding]]] = {}
    for path, tensors, spans in files:
        for name, tensor in tensors.items():
            first, holdings = found.setdefault(name, (tensor, []))
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise refused(path, "ranks have it with other shapes or types", name)
            holdings += [Holding(path, box, spans[box.key]) for box in tensor.boxes]
    for name, (tensor, holdings) in found.items():
        if not covered(tensor.shape, (holding.box for holding in holdings)):
            raise refused(folder, "the boxes of all ranks leave a part of it out", name)
    return {name: (tensor, tuple(holdings)) for name, (tensor, holdings) in found.items()}


class Newest(NamedTuple):
    """The newest step that is whole, or None, and why each newer one was left out, newest first."""

    step: SavedStep | None
    left_out: tuple[tuple[int, str], ...]


def committed_steps(root: Path) -> list[int]:
    """The steps of a run that are committed, oldest first. No file is opened."""
    found = (step for path in root.glob("step-*") if (step := step_of_folder(path)) is not None)
    return sorted(step for step in found if (step_folder(root, step) / COMMIT).is_file())


def open_step(folder: Path) -> SavedStep:
    """The committed step in a folder. Reads its records, and no tensor.

    Raises `MaterializeError` for a step that is not committed, or whose records do not fit each other.
    """
    record = folder / COMMIT
    if folder.is_symlink():
        raise refused(folder, "it is a link; give the folder that it leads to")
    if not record.is_file():
        raise MaterializeError(f"{folder} is not committed", "`schedc checkpoint list` shows the steps that are")
    path = record
    try:
        commit = Commit.of_text(read_text(record))
        if step_of_folder(folder) != commit.step:
            raise ValueError(f"it commits step {commit.step}")
        manifests = []
        for rank, expected in enumerate(commit.sha256):
            path = folder / rank_file(rank, "json")
            text = read_text(path)
            if digest(text) != expected:
                raise ValueError("another manifest was committed")
            manifest = Manifest.of_text(text)
            if (manifest.step, manifest.rank, manifest.world) != (commit.step, rank, commit.world):
                raise ValueError("it is of another step or rank")
            manifests.append(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise refused(path, error) from None
    return SavedStep(folder, commit, tuple(manifests))


def flaws(step: SavedStep) -> Iterator[Flaw]:
    """The faults of a committed step. Reads every byte of its files."""
    whole = True
    for manifest in step.manifests:
        path = step.folder / rank_file(manifest.rank, "safetensors")
        try:
            spans = _spans(path, manifest)
            found = list(_flawed_pieces(path, manifest, spans))
        except MaterializeError as error:
            found = [Flaw(path, error.message)]
        except OSError as error:
            found = [Flaw(path, str(error))]
        whole = whole and not found
        yield from found
    if whole:
        try:
            _ = step.tensors
        except MaterializeError as error:
            yield Flaw(step.folder, error.message)


def flaw_in(step: SavedStep, path: Path, pieces: Collection[int]) -> Flaw | None:
    """The first fault in some pieces of a rank's file. Reads their bytes alone, and the header."""
    manifest = next(each for each in step.manifests if path == step.folder / rank_file(each.rank, "safetensors"))
    try:
        return next(_flawed_pieces(path, manifest, _spans(path, manifest), pieces), None)
    except MaterializeError as error:
        return Flaw(path, error.message)
    except OSError as error:
        return Flaw(path, str(error))


def newest(root: Path) -> Newest:
    """The newest committed step of which every byte is as it was written."""
    left_out = []
    for number in reversed(committed_steps(root)):
        try:
            step = open_step(step_folder(root, number))
        except MaterializeError as error:
            left_out.append((number, error.message))
            continue
        if (flaw := next(flaws(step), None)) is None:
            return Newest(step, tuple(left_out))
        left_out.append((number, str(flaw)))
    return Newest(None, tuple(left_out))


def _spans(path: Path, manifest: Manifest) -> dict[str, FileSpan]:
    """The spans of a rank's file. Raises `MaterializeError` where the manifest has others."""
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("it is not there")
        if path.stat().st_size != manifest.bytes:
            raise ValueError(f"it has {path.stat().st_size} bytes of {manifest.bytes}")
        spans = spans_in(path)
    except (OSError, ValueError, RecursionError) as error:
        raise refused(path, error) from None
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            span = spans.get(box.key)
            if span is None or (span.dtype, span.shape) != (tensor.dtype, box.size):
                raise refused(path, "its manifest has it with another shape or type", name)
    return spans


def _flawed_pieces(
    path: Path, manifest: Manifest, spans: dict[str, FileSpan], pieces: Collection[int] | None = None
) -> Iterator[Flaw]:
    """The pieces of a file that have changed. pieces: those to look at; by default all."""
    names = {box.key: name for name, tensor in manifest.tensors.items() for box in tensor.boxes}
    with path.open("rb") as file:
        for piece in range(len(manifest.crc32)) if pieces is None else sorted(pieces):
            file.seek(piece * PIECE)
            if crc32(file.read(PIECE)) == manifest.crc32[piece]:
                continue
            first, last = piece * PIECE, (piece + 1) * PIECE
            held = [names.get(key, key) for key, span in spans.items() if span.begin < last and span.end > first]
            yield Flaw(path, "a byte has changed since it was written", piece, tuple(dict.fromkeys(held)))
