"""The tensors of a committed step of a run: each is read from the boxes that the ranks have written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schedc_runtime.checkpoint.stored import InFile, Stored, in_span
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import COMMIT, PIECE
from schedc_runtime.saved.read import (
    HeldTensors,
    Holding,
    SavedStep,
    committed_steps,
    flaw_in,
    flaws,
    newest,
    open_step,
)
from schedc_runtime.saved.safetensors import header_bytes

MODEL = "model."
"""What the names of the model's own tensors begin with; the optimizer's begin otherwise."""


def is_run(path: Path) -> bool:
    """Whether a folder is a committed step, or a run with at least one."""
    return (path / COMMIT).is_file() or bool(committed_steps(path))


def saved_step(path: Path) -> SavedStep:
    """The step in a folder, or the newest step of a run in which no byte has changed. Reads all bytes.

    Raises `MaterializeError` where there is none.
    """
    if (path / COMMIT).is_file():
        step = open_step(path)
        if (flaw := next(flaws(step), None)) is not None:
            raise MaterializeError(f"step {step.step} is not whole: {flaw}", "load another step")
        return step
    found = newest(path)
    if found.step is None:
        why = "; ".join(f"step {step}: {reason}" for step, reason in found.left_out)
        raise MaterializeError(f"{path} has no committed step that is whole: {why}", "`schedc checkpoint verify` tells")
    return found.step


class FlawedStep(MaterializeError):
    """A byte that was wanted of a committed step is not as it was written."""


class LookedPieces:
    """The pieces of a step's files that this process has compared with their checksums, each once."""

    def __init__(self, step: SavedStep) -> None:
        self._step, self._looked = step, dict[Path, set[int]]()

    def look(self, spans: Iterable[tuple[Path, int, int]]) -> None:
        """Compare all pieces with bytes of ``spans``: files, first bytes and ends. Raises `FlawedStep`."""
        wanted: dict[Path, set[int]] = {}
        for path, begin, end in spans:
            pieces = wanted.setdefault(path, set())
            if path not in self._looked:
                pieces.update(range(-(-header_bytes(path) // PIECE)))
            pieces.update(range(begin // PIECE, -(-end // PIECE)))
        for path, pieces in wanted.items():
            looked = self._looked.setdefault(path, set())
            if (flaw := flaw_in(self._step, path, pieces - looked)) is not None:
                raise FlawedStep(f"step {self._step.step} is not whole: {flaw}", "load another step")
            looked |= pieces


def stored_in_boxes(tensors: HeldTensors) -> dict[str, InBoxes]:
    """The tensors of a step by name."""
    return {
        name: InBoxes(tuple(_BoxInFile(holding.box.offset, in_span(holding.path, name, holding.span))
                            for holding in _distinct(holdings)), tensor.shape)
        for name, (tensor, holdings) in tensors.items()
    }  # fmt: skip


def with_aliases(stored: Mapping[str, Stored], aliases: Iterable[Mapping[str, str]]) -> dict[str, Stored]:
    """The tensors of a step, and those of the model that lie under another name of theirs.

    aliases: of each rank, by name in the model the name of the same weight that comes first.
    """
    whole = dict(stored)
    for name, first in (pair for own in aliases for pair in own.items()):
        name, first = f"{MODEL}{name}", f"{MODEL}{first}"
        if (held := stored.get(first, stored.get(name))) is not None:
            whole.setdefault(name, held)
            whole.setdefault(first, whole[name])
    return whole


def _distinct(holdings: tuple[Holding, ...]) -> list[Holding]:
    """One of the holdings of each box."""
    return list({(holding.box.offset, holding.box.size): holding for holding in reversed(holdings)}.values())


@dataclass(frozen=True)
class _BoxInFile:
    """A box of a tensor in a file. offset: by dimension, where it begins."""

    offset: tuple[int, ...]
    stored: InFile


@dataclass(frozen=True)
class InBoxes:
    """A tensor in several boxes, which cover all of it. Boxes that overlap hold the same there."""

    parts: tuple[_BoxInFile, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].stored.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [rows, ...]."""
        if not self.shape:
            return self.parts[0].stored.read(target)
        for part, low, high in self._parts_of(first, len(target)):
            offset, size = part.offset, part.stored.shape
            rows = target.narrow(0, low - first, high - low)
            if size[1:] == self.shape[1:]:
                part.stored.read(rows, low - offset[0])
                continue
            held = torch.empty((high - low, *size[1:]), dtype=self.dtype)
            part.stored.read(held, low - offset[0])
            for axis in range(1, len(size)):
                rows = rows.narrow(axis, offset[axis], size[axis])
            rows.copy_(held)
        return None

    def spans(self, first: int, count: int) -> Iterator[tuple[Path, int, int]]:
        """The bytes that `read` reads for ``count`` rows: file, first byte, and end."""
        if not self.shape:
            held = self.parts[0].stored
            yield Path(held.path), held.offset, held.offset + held.nbytes
            return
        for part, low, high in self._parts_of(first, count):
            row = part.stored.nbytes // part.stored.shape[0]
            begin = part.stored.offset + (low - part.offset[0]) * row
            yield Path(part.stored.path), begin, begin + (high - low) * row

    def _parts_of(self, first: int, count: int) -> Iterator[tuple[_BoxInFile, int, int]]:
        """The boxes with some of the rows, and which rows of the tensor those are."""
        for part in self.parts:
            low, high = max(first, part.offset[0]), min(first + count, part.offset[0] + part.stored.shape[0])
            if low < high and part.stored.nbytes:
                yield part, low, high
