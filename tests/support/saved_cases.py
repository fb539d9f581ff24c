"""Small checkpoints of runs: two ranks that hold boxes of three tensors, with other values at each step."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.saved.form import TensorBox, TensorInBoxes
from schedc_runtime.saved.safetensors import safetensors_header
from schedc_runtime.saved.write import ImageBytes, commit, write_rank

WORLD = 2
WHOLE = {"model.a": torch.arange(24.0).view(6, 4), "model.b": torch.arange(9.0), "model.c": torch.tensor(7)}
NAMES = {torch.float32: "F32", torch.int64: "I64"}
HELD = {
    0: {"model.a": [((0, 0), (2, 4)), ((2, 0), (4, 1))], "model.c": [((), ())]},
    1: {"model.a": [((2, 1), (4, 3))], "model.b": [((0,), (9,))], "model.c": [((), ())]},
}
"""By rank and name: the boxes (offset, size) that a rank writes."""


def part(value: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    for axis, (first, length) in enumerate(zip(offset, size, strict=True)):
        value = value.narrow(axis, first, length)
    return value.contiguous()


def write_image(path: Path, rank: int, add: int, more: int = 0) -> tuple[ImageBytes, dict[str, TensorInBoxes]]:
    """A file with 64 bytes before a rank's tensors of step ``add``, and the tensors as a manifest says them.

    more: numbers of float32 that the rank holds besides, as `model.more.RANK`.
    """
    tensors, parts = {}, []
    own = f"model.more.{rank}"
    wholes = WHOLE | {own: torch.arange(more, dtype=torch.float32) % 4096}
    for name, boxes in [*HELD[rank].items(), *([(own, [((0,), (more,))])] if more else [])]:
        value = wholes[name] + add
        dtype = NAMES[value.dtype]
        keyed = tuple(TensorBox(f"{name}@{number}", *box) for number, box in enumerate(boxes))
        tensors[name] = TensorInBoxes(dtype, tuple(value.shape), keyed)
        parts += [(box.key, dtype, part(value, box.offset, box.size)) for box in keyed]
    content = safetensors_header((key, dtype, tuple(value.shape)) for key, dtype, value in parts)
    content += b"".join(value.numpy().tobytes() for _, _, value in parts)
    path.write_bytes(b"x" * 64 + content)
    return ImageBytes(os.open(path, os.O_RDONLY), 64, len(content)), tensors


def save(
    root: Path, step: int, attempt: str = "first", ranks: tuple[int, ...] = (0, 1), end: bool = True, more: int = 0,
    images: Path | None = None,
) -> None:  # fmt: skip
    """Write the files of some ranks, and commit the step. images: their folder, by default beside ``root``."""
    for rank in ranks:
        source, tensors = write_image((images or root.parent) / "image", rank, step, more)
        try:
            write_rank(root, attempt, step, rank, WORLD, source, tensors, {})
        finally:
            os.close(source.descriptor)
    if end:
        commit(root, attempt, step, WORLD, {"program": "1f1b"})


def values(root: Path) -> dict[str, Tensor]:
    """All tensors of the model, read whole."""
    read = {}
    for name, stored in open_checkpoint(root).items():
        read[name] = torch.empty(stored.shape, dtype=stored.dtype)
        stored.read(read[name])
    return read


def assert_step(root: Path, step: int) -> None:
    """The newest checkpoint of a run is that of ``step``."""
    read = values(root)
    assert {name.removeprefix("model.") for name in WHOLE} <= read.keys()
    for name, value in WHOLE.items():
        assert torch.equal(read[name.removeprefix("model.")], value + step)
