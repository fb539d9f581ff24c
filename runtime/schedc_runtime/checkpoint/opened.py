"""Opens a checkpoint of any known form: a file, an index of files, a directory, or a state dict in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from schedc_runtime.checkpoint import distributed, torch_file
from schedc_runtime.checkpoint.committed import MODEL, is_run, saved_step, stored_in_boxes, with_aliases
from schedc_runtime.checkpoint.stored import InFile, InMemory, Stored, in_span, inside_file, reading
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.plain import FORMS, json_of, refused
from schedc_runtime.saved.read import SavedStep
from schedc_runtime.saved.safetensors import spans_in


def safetensors_in(path: Path) -> dict[str, InFile]:
    """The tensors of a safetensors file by name. Reads its header only, and checks it whole (`spans_in`).

    Raises `MaterializeError` for any other file.
    """
    with reading(path):
        return {name: in_span(path, name, span) for name, span in spans_in(path).items()}


_INDEX = ".index.json"
_IN_DIRECTORY = (
    "model.safetensors.index.json", "model.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin", distributed.METADATA,
)  # fmt: skip
"""What a directory is searched for, in this order."""


def open_checkpoint(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> Mapping[str, Stored]:
    """The tensors of a checkpoint by name, each of its own shape, none of them read yet.

    Raises `MaterializeError` for a file that is not there, or of no known form.
    """
    if isinstance(source, Mapping):
        return {name: InMemory(value) for name, value in source.items()}
    path = Path(source)
    if path.is_dir() and is_run(path):
        return _of_model(saved_step(path))
    if path.is_dir():
        known = next((path / name for name in _IN_DIRECTORY if (path / name).is_file()), None)
        if known is None:
            raise MaterializeError(f"no checkpoint in {path}", f"known are {FORMS}")
        path = known
    if not path.is_file():
        raise MaterializeError(f"there is no checkpoint {path}", f"give the path of {FORMS}")
    with reading(path):
        return _open_file(path)


def _of_model(step: SavedStep) -> dict[str, Stored]:
    """The model's tensors of a run's checkpoint, under all of the model's names."""
    with reading(step.folder, "aliases"):
        aliases = [dict(manifest.facts.get("aliases", {})) for manifest in step.manifests]
        stored = with_aliases(stored_in_boxes(step.tensors), aliases)
    return {name.removeprefix(MODEL): each for name, each in stored.items() if name.startswith(MODEL)}


def _open_file(path: Path) -> Mapping[str, Stored]:
    if path.name == distributed.METADATA:
        return distributed.stored_in(path.parent)
    if not path.name.endswith(_INDEX):
        return _reader(path)(path)
    placed = json_of(path.read_text(encoding="utf-8"))["weight_map"]
    names = {name: inside_file(path.parent, name) for name in sorted(set(placed.values()))}
    if lost := sorted(str(each) for each in names.values() if not each.is_file()):
        raise refused(path, f"the index names {lost[0]}, which is not there")
    files = {name: _reader(each)(each) for name, each in names.items()}
    if lost := sorted(name for name, file in placed.items() if name not in files[file]):
        raise refused(names[placed[lost[0]]], f"the tensor is missing, although {path.name} places it here", lost[0])
    return {name: files[file][name] for name, file in placed.items()}


def _reader(path: Path) -> Callable[[Path], Mapping[str, Stored]]:
    return safetensors_in if path.suffix == ".safetensors" else torch_file.stored_in
