"""Finds the newest state of a run that all ranks have kept: in memory, or else on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from schedc_runtime.checkpoint.committed import stored_in_boxes
from schedc_runtime.checkpoint.stored import Stored
from schedc_runtime.errors import MaterializeError
from schedc_runtime.keeper.flush import described_tensors, held_steps
from schedc_runtime.keeper.images import TENSORS
from schedc_runtime.keeper.places import Places
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.saved.form import COMMIT, TensorInBoxes, step_folder
from schedc_runtime.saved.read import committed_steps, joined_boxes, newest, open_step
from schedc_runtime.saved.safetensors import FileSpan, spans_in


class Kept(NamedTuple):
    """The state to go on from. step: None without one. left_out: why newer ones cannot be used.

    tensors: by name. facts: [ranks that kept it]. on_disk: the newest step that is committed and whole, or None.
    """

    step: int | None
    in_memory: bool
    tensors: Mapping[str, Stored]
    facts: list[dict[str, Any]]
    on_disk: int | None
    left_out: list[str]
    world: int

    def told(self, root: Path) -> Iterator[str]:
        """Where the run goes on from, and what was left out."""
        disk = "nothing on disk yet" if self.on_disk is None else f"disk has {self.on_disk:,}"
        if self.step is None:
            yield f"checkpoints: {root}, a new run"
        elif self.in_memory:
            yield f"checkpoints: {root}, step {self.step:,} from memory (all {self.world} ranks); {disk}"
        else:
            yield f"checkpoints: {root}, step {self.step:,} from disk"
        yield from (f"  left out: {why}" for why in self.left_out)


class _InMemory(NamedTuple):
    tensors: Mapping[str, Stored]
    facts: list[dict[str, Any]]


def newest_kept(control: ControlPlane, places: Places, root: Path) -> Kept:
    """The newest state that this run can go on from. A collective of all ranks, with the same answer on each."""
    world = len(control.names)
    images = places.images(control.process)
    mine = [held.step for held in held_steps([images])] if images else []
    for image in images:
        image.close()
    disk: list[Any] = [None, []]
    if control.process == 0:
        found = newest(root)
        disk = [found.step and found.step.step, [f"step {step:,} on disk: {why}" for step, why in found.left_out]]
    told = control.gather("looking for a state to go on from", [mine, disk])
    on_disk, left_out = told[0][1]
    steps = [set(each[0]) for each in told]
    common = sorted(set.intersection(*steps), reverse=True)
    loose = max(set.union(*steps), default=-1)
    if loose > max(common, default=-1):
        left_out.append(f"step {loose:,} in memory: not all ranks have it")
    for step in common:
        if on_disk is not None and step < on_disk:
            break
        state = _in_memory(places, step)
        why = state if isinstance(state, str) else ""
        answers = control.gather("opening a state in memory", [why, [] if why else state.facts])  # type: ignore[union-attr]
        if not any(answer[0] for answer in answers):
            assert isinstance(state, _InMemory)
            return Kept(step, True, state.tensors, _everyone(answers), on_disk, left_out, world)
        left_out.append(f"step {step:,} in memory: {next(answer[0] for answer in answers if answer[0])}")
    if on_disk is None:
        return Kept(None, False, {}, [], None, left_out, world)
    saved = open_step(step_folder(root, on_disk))
    facts = [dict(manifest.facts) for manifest in saved.manifests]
    return Kept(on_disk, False, stored_in_boxes(saved.tensors), facts, on_disk, left_out, world)


def set_aside(root: Path, step: int, attempt: str) -> None:
    """Rename the committed steps behind ``step``, which the run will write again: they were not whole."""
    for newer in committed_steps(root):
        if newer > step:
            folder = step_folder(root, newer)
            (folder / COMMIT).rename(folder / f"{COMMIT}.left-out")
            folder.rename(root / f"left-out-{folder.name}-{attempt}")


def _in_memory(places: Places, step: int) -> _InMemory | str:
    """The tensors of all images of a step on this machine; a text where they do not make up the model."""
    files: list[tuple[Path, dict[str, TensorInBoxes], dict[str, FileSpan]]] = []
    facts = []
    for rank in places.ranks():
        for image in places.images(rank):
            header = image.header()
            description = image.description(header) if header is not None and header.step == step else None
            if header is not None and description is not None:
                files.append(
                    (image.path, described_tensors(description), spans_in(image.path, TENSORS, header.tensors))
                )
                facts.append({"rank": rank, "facts": description["facts"], "world": description["run"]["world"]})
            image.close()
    try:
        return _InMemory(stored_in_boxes(joined_boxes(places.folder, files)), facts)
    except MaterializeError as error:
        return error.message


def _everyone(answers: list[Any]) -> list[dict[str, Any]]:
    """[ranks] the facts of all machines, each rank once."""
    by_rank = {each["rank"]: each["facts"] for answer in answers for each in answer[1]}
    return [by_rank[rank] for rank in sorted(by_rank)]
