"""Brings states from shared memory to disk: the images of all ranks, then the record that commits the step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from schedc_runtime.keeper.images import Image, ImageHeader
from schedc_runtime.keeper.places import Places, RankHere
from schedc_runtime.saved.form import COMMIT, TensorInBoxes, step_folder, tensor_of
from schedc_runtime.saved.write import clear, commit, write_rank

_OTHERS = 600.0
"""Seconds to wait for what the keepers of other machines write."""
_LOOK = 0.05
GENERATIONS = 2
"""Committed steps that stay on disk."""


class Flushed(NamedTuple):
    """A step that is on disk now. seconds: since its writing began. committed: False where other machines commit."""

    step: int
    seconds: float
    committed: bool


class Held(NamedTuple):
    """A step that all ranks of this machine hold. durable: whether it shall go to disk in any case."""

    step: int
    durable: bool


def held_steps(images: Sequence[Sequence[Image]]) -> list[Held]:
    """The steps that every rank has a valid image of, newest first. images: [ranks] those of a rank."""
    headers = [{header.step: header.durable for image in rank if (header := image.header())} for rank in images]
    common = set(headers[0]).intersection(*headers[1:]) if headers else set()
    return [Held(step, any(rank[step] for rank in headers)) for step in sorted(common, reverse=True)]


def flush(places: Places, trainers: Sequence[RankHere], step: int) -> Flushed | None:
    """Write the images of ``step`` of all ranks here, and commit the step where rank 0 is here.

    None where a rank has begun another state meanwhile, or other machines have not written theirs.
    Raises `OSError` where the disk is full or refuses.
    """
    began, first = time.monotonic(), trainers[0]
    root = Path(first.root)
    if (step_folder(root, step) / COMMIT).exists():
        return Flushed(step, 0.0, True)
    described = [_write_image(places, root, trainer, step) for trainer in trainers]
    if any(each is None for each in described):
        return None
    committed = any(trainer.rank == 0 for trainer in trainers)
    if committed:
        facts = described[0]["run"] if described[0] else {}
        if not _commit(root, described[0]["attempt"] if described[0] else "", step, first, facts):
            return None
        clear(root, max(GENERATIONS, first.keep))
    return Flushed(step, time.monotonic() - began, committed)


def _write_image(places: Places, root: Path, trainer: RankHere, step: int) -> dict[str, Any] | None:
    """Write a rank's image of a step; its description, or None where the rank no longer has it."""
    for image in places.images(trainer.rank):
        with _reading(image, step) as header:
            description = image.description(header) if header is not None else None
            if header is None or description is None:
                continue
            attempt, tensors = description["attempt"], described_tensors(description)
            source, same = image.source(header), partial(_holds, image, header)
            written = write_rank(
                root, attempt, step, trainer.rank, trainer.world, source, tensors, description["facts"], same
            )
            return None if written is None else description
    return None


def described_tensors(description: dict[str, Any]) -> dict[str, TensorInBoxes]:
    """The tensors of an image by name."""
    return {name: tensor_of(name, entry) for name, entry in description["tensors"].items()}


def _holds(image: Image, header: ImageHeader) -> bool:
    """Whether an image still has this header."""
    return image.header() == header


@contextmanager
def _reading(image: Image, step: int) -> Iterator[ImageHeader | None]:
    """The header of an image of ``step``, which the trainer leaves alone meanwhile; None for another step."""
    try:
        header = image.header()
        if header is None or header.step != step:
            yield None
            return
        image.read_now = True
        try:
            yield header if image.header() == header else None
        finally:
            image.read_now = False
    finally:
        image.close()


def _commit(root: Path, attempt: str, step: int, trainer: RankHere, facts: dict[str, Any]) -> bool:
    """Commit a step. Waits for the other machines, if there are any."""
    deadline = time.monotonic() + (_OTHERS if trainer.here < trainer.world else 0.0)
    while commit(root, attempt, step, trainer.world, facts) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True
