"""Brings states from shared memory to disk: the images of all ranks, then the record that commits the step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import Image, ImageHeader
from schedc_runtime.keeper.places import Places, RankHere
from schedc_runtime.saved.form import COMMIT, TensorInBoxes, step_folder, tensor_of
from schedc_runtime.saved.write import clear, commit, take_back, write_rank

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

    None where a rank no longer has this state, or has it from another attempt than others here, or other machines have
    not written theirs. Nothing of the step stays then. Raises `OSError` where the disk is full or refuses, and
    `RuntimeFault` for an image that is damaged.
    """
    began, first = time.monotonic(), trainers[0]
    root, done = Path(first.root), False
    if (step_folder(root, step) / COMMIT).exists():
        return Flushed(step, 0.0, True)
    leads = any(trainer.rank == 0 for trainer in trainers)
    try:
        described = _write_images(places, root, trainers, step)
        done = bool(described) and (not leads or _commit(places, root, step, trainers, described[0]))
    finally:
        if not done:
            take_back(root, step, (trainer.rank for trainer in trainers))
    if done and leads:
        clear(root, max(GENERATIONS, first.keep))
    return Flushed(step, time.monotonic() - began, leads) if done else None


def _write_images(places: Places, root: Path, trainers: Sequence[RankHere], step: int) -> list[dict[str, Any]]:
    """Write the images of a step; [ranks] their descriptions. [] where a rank no longer has the state.

    All ranks leave their images alone from before the first is written until behind the last.
    """
    described = []
    with ExitStack() as reading:
        held = [reading.enter_context(_reading(places, trainer.rank, step)) for trainer in trainers]
        for trainer, each in zip(trainers, held, strict=True):
            if None in held or each is None:
                return []
            image, header = each
            if (description := image.description(header)) is None:
                if _holds(image, header):
                    raise RuntimeFault(
                        f"the image of rank {trainer.rank} in {places.folder} is damaged", "go on from disk"
                    )
                return []
            written = write_rank(
                root, description["attempt"], step, trainer.rank, trainer.world, image.source(header),
                described_tensors(description, header), description["facts"], partial(_holds, image, header),
            )  # fmt: skip
            if written is None:
                return []
            described.append(description)
    return described


def described_tensors(description: dict[str, Any], header: ImageHeader) -> dict[str, TensorInBoxes]:
    """The tensors of an image by name. Those that are holes of a copy are left out."""
    tensors = {name: tensor_of(name, entry) for name, entry in description["tensors"].items()}
    holes = set(description.get("elsewhere", ())) if header.copy else set()
    if not holes:
        return tensors
    kept = {name: [box for box in tensor.boxes if box.key not in holes] for name, tensor in tensors.items()}
    return {name: replace(tensors[name], boxes=tuple(boxes)) for name, boxes in kept.items() if boxes}


def _holds(image: Image, header: ImageHeader) -> bool:
    """Whether an image still has this header."""
    return image.header() == header


@contextmanager
def _reading(places: Places, rank: int, step: int) -> Iterator[tuple[Image, ImageHeader] | None]:
    """A rank's image of ``step``, which the trainer leaves alone meanwhile; None where the rank has none."""
    images = places.images(rank)
    marked = [image for image in images if (header := image.header()) is not None and header.step == step]
    try:
        for image in marked:
            image.read_now = True
        whole = ((image, header) for image in marked if (header := image.header()) is not None and header.step == step)
        yield next(whole, None)
    finally:
        for image in marked:
            image.read_now = False
        for image in images:
            image.close()


def _commit(
    places: Places, root: Path, step: int, trainers: Sequence[RankHere], description: Mapping[str, Any]
) -> bool:
    """Commit a step. Waits for the other machines, if there are any, until ranks begin another attempt."""
    world, attempt = trainers[0].world, trainers[0].attempt
    deadline = time.monotonic() + (_OTHERS if len(trainers) < world else 0.0)
    while commit(root, description["attempt"], step, world, description["run"]) is None:
        if time.monotonic() > deadline or any(each.attempt != attempt for each in places.trainers()):
            return False
        time.sleep(_LOOK)
    return True
