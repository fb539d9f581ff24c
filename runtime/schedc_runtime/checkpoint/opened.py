"""Opens a checkpoint of any known form: a file, an index of files, a directory, or a state dict in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from schedc_runtime.checkpoint import safetensors, torch_file
from schedc_runtime.checkpoint.stored import InMemory, Stored
from schedc_runtime.errors import MaterializeError

_INDEX = ".index.json"
_IN_DIRECTORY = (
    "model.safetensors.index.json", "model.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin", ".metadata",
)  # fmt: skip
"""What a directory is searched for, in this order."""

_FORMS = "a .safetensors or torch.save file, its .index.json, a directory with these, or a DCP directory"


def open_checkpoint(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, each of its own shape, none of them read yet.

    Raises `MaterializeError` for a file that is not there, or of no known form.
    """
    if isinstance(source, Mapping):
        return {name: InMemory(value) for name, value in source.items()}
    path = Path(source)
    if path.is_dir():
        inside = next((path / name for name in _IN_DIRECTORY if (path / name).is_file()), None)
        if inside is None:
            raise MaterializeError(f"no checkpoint in {path}", f"known are {_FORMS}")
        path = inside
    if not path.is_file():
        raise MaterializeError(f"there is no checkpoint {path}", f"give the path of {_FORMS}")
    try:
        return _open_file(path)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError) as error:
        raise MaterializeError(
            f"{path} cannot be read: {type(error).__name__}: {error}", f"known are {_FORMS}"
        ) from error


def _open_file(path: Path) -> dict[str, Stored]:
    if path.name == ".metadata":
        from schedc_runtime.checkpoint import distributed  # takes half a second to import

        return distributed.stored_in(path.parent)
    if not path.name.endswith(_INDEX):
        return _reader(path)(path)
    placed: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    files = {name: _reader(path.parent / name)(path.parent / name) for name in sorted(set(placed.values()))}
    if lost := sorted(name for name, file in placed.items() if name not in files[file]):
        raise KeyError(f"`{lost[0]}` is not in {placed[lost[0]]}, where the index has it")
    return {name: files[file][name] for name, file in placed.items()}


def _reader(path: Path) -> Callable[[Path], dict[str, Any]]:
    return safetensors.stored_in if path.suffix == ".safetensors" else torch_file.stored_in
