"""Saves a pipeline with its optimizers in a folder of its own, and loads it at any number of ranks.

    runs/last/step-00000100/    a committed step, as `Checkpoints` writes them

`load` also reads folders of torch's distributed checkpoints (DCP): exports by `schedc checkpoint export --to dcp`, and
older checkpoints without checksums. A checkpoint becomes visible in one rename.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from schedc_runtime.checkpoint.distributed import METADATA, stored_as_written
from schedc_runtime.checkpoint.exported import FACTS
from schedc_runtime.checkpoint.stored import Stored, reading
from schedc_runtime.errors import MaterializeError
from schedc_runtime.pipeline.agree.all_ranks import on_all_ranks
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.materialize import check_materialized
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.saved.form import step_folder, tensor_of
from schedc_runtime.saved.read import committed_steps, open_step
from schedc_runtime.saved.write import commit, write_rank
from schedc_runtime.trainers.box_file import BoxBytes, FileLayout
from schedc_runtime.trainers.further_states import packed, unpacked
from schedc_runtime.trainers.held_state import model_parts
from schedc_runtime.trainers.optimizer_state import Optimizers
from schedc_runtime.trainers.run_state import KeptTensors, load_run_state, run_state, tied_names

_EXTRA = "extra"
_KINDS = {"form": int, "steps": int, "hot": dict, "optimizer": list, "extra": dict}
"""Types of the facts of a checkpoint without checksums."""


def save(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of the pipeline and of its optimizers into ``folder``. A collective of all ranks, between steps.

    optimizer: this rank's; None on a rank without parameters, or on all ranks to save the model alone. extra: tensors,
    plain values and containers of these, which `load` returns. A folder of that name is replaced when the new one is
    complete.

    Raises the same `RuntimeFault` on every rank for a state that a checkpoint cannot hold, or for a disk that refuses.
    """
    assembly, path = pipe._assembly, Path(folder)
    check_materialized(assembly)
    partial = path.with_name(f"{path.name}.partial")
    rank, world, what = assembly.network.process, len(assembly.guard.control.names), "saving a checkpoint"
    further = {"states": {_EXTRA: dict(extra or {})}, "generators": {}}

    def begin() -> str:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return token_hex(6)

    def write() -> None:
        state = run_state(pipe, optimizer, further)
        layout = FileLayout.of(state.boxes)
        tensors = {name: tensor_of(name, entry) for name, entry in layout.entries.items()}
        write_rank(partial, attempts[0], pipe.steps, rank, world, BoxBytes(state.boxes, layout), tensors, state.facts)

    def end() -> None:
        if rank == 0:
            commit(partial, attempts[0], pipe.steps, world, {"world": world, "schedule": pipe.program.name})
            _replace(partial, path)

    _, attempts = on_all_ranks(assembly.guard, what, begin, lambda attempt: attempt)
    on_all_ranks(assembly.guard, what, write)
    on_all_ranks(assembly.guard, what, end)


def load(
    folder: str | os.PathLike[str], pipe: Pipeline, optimizer: Optimizers = None, groups: str | None = None
) -> dict[str, Any]:
    """Give the pipeline, and its optimizers, the state of a checkpoint of `save`. A collective, between steps.

    The schedule and the numbers of ranks and replicas may be others than those of the run that saved it. groups:
    ``"saved"`` for optimizers that take the groups of the run. Returns the ``extra`` of `save`.

    Raises the same `MaterializeError` on every rank for a folder that is no such checkpoint, has a flaw, or is of
    another model. Nothing has changed then.
    """
    assembly, extra = pipe._assembly, _Extra()
    check_materialized(assembly)
    kept, _ = on_all_ranks(assembly.guard, "loading a checkpoint", lambda: _kept(Path(folder), assembly))
    load_run_state(pipe, optimizer, {_EXTRA: extra}, kept, groups)
    return extra.value


def extra_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``extra`` of a checkpoint alone, read by this rank alone. Raises `MaterializeError` as `load`."""
    kept = _kept(Path(folder), None)
    with reading(Path(folder), _EXTRA):
        return dict(unpacked(kept.facts[0]["states"], kept.whole)["states"][_EXTRA])


def state_in(extra: Mapping[str, Any], name: str) -> Any:
    """A state in the ``extra`` of a checkpoint. Older checkpoints have it as a text that `torch.save` wrote.

    Raises `MaterializeError` for such a text with more than tensors, containers and plain values.
    """
    if not isinstance(state := extra[name], str):
        return state
    try:
        return torch.load(io.BytesIO(base64.b64decode(state)), weights_only=True)
    except Exception:  # whatever torch says of a broken file, and its advice to read it unchecked
        raise MaterializeError(
            "the checkpoint has a trainer's state that is more than tensors and plain values", "save it again"
        ) from None


class _Extra:
    """Takes the ``extra`` of a checkpoint."""

    value: dict[str, Any]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = dict(state)


def _kept(path: Path, assembly: Assembly | None) -> KeptTensors:
    """The state in a folder. A run that was killed while it replaced a checkpoint has left the previous one.

    assembly: of the pipeline, which says what an older form leaves out.
    """
    if not path.exists() and _previous(path).exists():
        path = _previous(path)
    if (path / METADATA).is_file():
        stored = stored_as_written(path)
        return KeptTensors(stored, _facts_of_dcp(path, stored, assembly))
    steps = committed_steps(path)
    if not steps:
        raise MaterializeError(f"{path} is no complete checkpoint", "give a folder that `save` has written")
    return KeptTensors.on_disk(open_step(step_folder(path, steps[-1])))


def _facts_of_dcp(path: Path, stored: Mapping[str, Stored], assembly: Assembly | None) -> list[dict[str, Any]]:
    """[ranks] the facts that a DCP checkpoint has beside its tensors."""
    if FACTS not in stored:
        raise MaterializeError(f"{path} was not written by `save`", "materialize(checkpoint=...) reads its model alone")
    with reading(path / METADATA, FACTS):
        raw = torch.empty(stored[FACTS].shape, dtype=torch.uint8)
        stored[FACTS].read(raw)
        facts: dict[str, Any] = json.loads(raw.numpy().tobytes())
        if facts["form"] == 2 and isinstance(facts["ranks"], list) and facts["ranks"]:
            return list(facts["ranks"])
        kinds = [type(each) for each in facts["optimizer"]]
        if {name: type(facts[name]) for name in _KINDS} != _KINDS or kinds != [list, dict, dict] or facts["form"] != 1:
            raise ValueError("the entries are not a checkpoint's")
        states = {"states": {_EXTRA: facts[_EXTRA]}, "generators": {}}
        seed, aliases = 0, dict[str, str]()
        if assembly is not None:
            seed, aliases = assembly.settings.seed, tied_names(assembly, [*model_parts(assembly)])
        own = {name: facts[name] for name in ("steps", "optimizer", "hot")}
        own |= {"seed": seed, "replica": 0, "aliases": aliases, "states": packed(states, lambda _: "", _EXTRA)}
        return [own]


def _replace(partial: Path, path: Path) -> None:
    """Let a complete folder take the name ``path``. A rank that is killed in between leaves the previous one."""
    previous = _previous(path)
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    partial.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")
