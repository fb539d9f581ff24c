"""Finds the states of a run that all ranks have kept, in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from schedc_runtime.checkpoint.committed import stored_in_boxes
from schedc_runtime.errors import MaterializeError
from schedc_runtime.keeper.flush import described_tensors, held_steps
from schedc_runtime.keeper.images import TENSORS
from schedc_runtime.keeper.places import Places
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.saved.form import COMMIT, TensorInBoxes, step_folder
from schedc_runtime.saved.read import committed_steps, joined_boxes, open_step
from schedc_runtime.saved.safetensors import FileSpan, spans_in
from schedc_runtime.trainers.run_state import KeptTensors


class Kept(NamedTuple):
    """A state to go on from. step: None without one. left_out: why newer ones cannot be used.

    on_disk: the newest step that is committed, or None. world: number of ranks.
    """

    step: int | None
    in_memory: bool
    state: KeptTensors
    on_disk: int | None
    left_out: list[str]
    world: int

    def told(self, root: Path, replicas: int) -> Iterator[str]:
        """Where the run goes on from, what was left out, and what another number of ``replicas`` changes."""
        disk = "nothing on disk yet" if self.on_disk is None else f"disk has {self.on_disk:,}"
        if self.step is None:
            yield f"checkpoints: {root}, a new run"
        elif self.in_memory:
            yield f"checkpoints: {root}, step {self.step:,} from memory (all {self.world} ranks); {disk}"
        else:
            yield f"checkpoints: {root}, step {self.step:,} from disk"
        yield from (f"  left out: {why}" for why in self.left_out)
        before = max((facts["replica"] + 1 for facts in self.state.facts), default=replicas)
        if before != replicas:
            calls = f"for the same batch each makes {before / replicas:.3g} x the calls of an update"
            yield f"  not the same bits: replicas, {before} before and {replicas} now; {calls} (`Mesh.calls`)"


def kept_states(control: ControlPlane, places: Places, root: Path) -> Iterator[Kept]:
    """The states that this run can go on from, newest first; at last that of a new run, unless a step is on disk.

    `load_run_state` compares bytes on disk with their checksums. A caller whose load fails adds why to ``left_out``.
    Each next state is a collective of all ranks, with the same answer on each.
    """
    images = places.images(control.process)
    mine = [held.step for held in held_steps([images])] if images else []
    for image in images:
        image.close()
    disk = list(reversed(committed_steps(root))) if control.process == 0 else []
    told = control.gather("looking for a state to go on from", [mine, disk])
    on_disk: list[int] = told[0][1]
    steps = [set(each[0]) for each in told]
    common, left_out = sorted(set.intersection(*steps), reverse=True), list[str]()
    loose = max(set.union(*steps), default=-1)
    if loose > max(common, default=-1):
        left_out.append(f"step {loose:,} in memory: not all ranks have it")
    sources = sorted([(step, True) for step in common] + [(step, False) for step in on_disk], reverse=True)
    for step, in_memory in sources:
        kept = _in_memory(places, step) if in_memory else _on_disk(root, step)
        where = f"step {step:,} {'in memory' if in_memory else 'on disk'}"
        facts = kept.facts if in_memory and isinstance(kept, KeptTensors) else []
        answers = control.gather(f"opening {where}", [kept if isinstance(kept, str) else "", facts])
        if why := next((answer[0] for answer in answers if answer[0]), ""):
            left_out.append(f"{where}: {why}")
            continue
        assert isinstance(kept, KeptTensors)
        state = kept._replace(facts=_everyone(answers)) if in_memory else kept
        yield Kept(step, in_memory, state, on_disk[0] if on_disk else None, left_out, len(told))
    yield Kept(None, False, KeptTensors({}, []), None, left_out, len(told))


def set_aside(root: Path, step: int, attempt: str) -> None:
    """Rename the committed steps behind ``step``, which the run will write again: they were not whole."""
    for newer in committed_steps(root):
        if newer > step:
            folder = step_folder(root, newer)
            (folder / COMMIT).rename(folder / f"{COMMIT}.left-out")
            folder.rename(root / f"left-out-{folder.name}-{attempt}")


def _on_disk(root: Path, step: int) -> KeptTensors | str:
    """The tensors of a committed step; a text where its records or headers do not fit each other."""
    try:
        return KeptTensors.on_disk(open_step(step_folder(root, step)))
    except MaterializeError as error:
        return error.message


def _in_memory(places: Places, step: int) -> KeptTensors | str:
    """The tensors of all images of a step on this machine; a text where they do not make up the model."""
    files: list[tuple[Path, dict[str, TensorInBoxes], dict[str, FileSpan]]] = []
    facts = []
    for rank in places.ranks():
        for image in places.images(rank):
            header = image.header()
            description = image.description(header) if header is not None and header.step == step else None
            if header is not None and description is not None:
                files.append(
                    (image.path, described_tensors(description, header), spans_in(image.path, TENSORS, header.tensors))
                )
                facts.append({"rank": rank, "facts": description["facts"], "world": description["run"]["world"]})
            image.close()
    try:
        return KeptTensors(stored_in_boxes(joined_boxes(places.folder, files)), facts)
    except MaterializeError as error:
        return error.message


def _everyone(answers: list[Any]) -> list[dict[str, Any]]:
    """[ranks] the facts of all machines, each rank once."""
    by_rank = {each["rank"]: each["facts"] for answer in answers for each in answer[1]}
    return [by_rank[rank] for rank in sorted(by_rank)]
