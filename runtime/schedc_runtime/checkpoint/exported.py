"""Writes the model of a run's checkpoint as whole tensors, for programs that know nothing of the run.

model-00001-of-00002.safetensors, ..., model.safetensors.index.json      a model that fits one file: model.safetensors
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from schedc_runtime.checkpoint.committed import stored_in_boxes, with_aliases
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.checkpoint.stored import TYPE_NAMES, Stored, reading, whole_tensor
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.read import SavedStep
from schedc_runtime.saved.safetensors import safetensors_header
from schedc_runtime.saved.write import whole_file, write_whole

FACTS = "facts"
"""[bytes] JSON in a DCP checkpoint: what is no tensor."""


def export_model(step: SavedStep, target: Path, form: str, shard: int, config: Path | None = None) -> list[Path]:
    """Write the model of a step into the new folder ``target``, and return the files in their order.

    form: ``safetensors``, ``dcp`` for torch's distributed checkpoints, or ``hf`` with ``config``, as `export_for_hub`
    says. shard: bytes of tensors in a file of
    safetensors. A larger tensor has a file of its own. One tensor is in memory at a time, or all for the
    other forms.
    Raises `MaterializeError` for a step with a flaw, without a model, or where ``target`` is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise MaterializeError(f"{target} is not empty", "name a new folder")
    if form == "hf":
        from schedc_runtime.checkpoint.exported_hub import export_for_hub

        if config is None:
            raise MaterializeError("--to hf needs the model's configuration", "give --config, its config.json")
        return export_for_hub(step, target, config, shard)
    stored = open_checkpoint(step.folder)  # looks at all bytes
    if not stored:
        raise MaterializeError(f"{step.folder} has no tensor of a model", "`schedc checkpoint show` lists what it has")
    target.mkdir(parents=True, exist_ok=True)
    if form == "dcp":
        return _as_dcp(step, target)
    types = {name: TYPE_NAMES[each.dtype] for name, each in stored.items()}
    shards = list(_shards({name: _bytes(each) for name, each in stored.items()}, shard))
    placed: dict[str, str] = {}
    paths: list[Path] = []
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        header = safetensors_header((name, types[name], stored[name].shape) for name in names)
        with whole_file(target / file) as writer:
            writer.write(header)
            for name in names:
                writer.write(whole_tensor(stored[name]).view(-1).view(torch.uint8).numpy().data)
        placed |= dict.fromkeys(names, file)
        paths.append(target / file)
    if len(shards) > 1:
        total = sum(map(_bytes, stored.values()))
        index = target / "model.safetensors.index.json"
        write_whole(index, json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1))
        paths.append(index)
    return paths


def _bytes(stored: Stored) -> int:
    return prod(stored.shape) * stored.dtype.itemsize


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """The names in their order, in files of at most ``most`` bytes where a tensor is not larger."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _as_dcp(step: SavedStep, target: Path) -> list[Path]:
    """All tensors of a step under their names, and what the ranks have said of it as JSON."""
    from torch.distributed.checkpoint.state_dict_saver import save

    ranks = [dict(manifest.facts) for manifest in step.manifests]
    aliases = (dict(facts.get("aliases", {})) for facts in ranks)
    values = {name: whole_tensor(each) for name, each in with_aliases(stored_in_boxes(step.tensors), aliases).items()}
    text = bytearray(json.dumps({"form": 2, "ranks": ranks}).encode())
    values[FACTS] = torch.frombuffer(text, dtype=torch.uint8)
    with reading(target), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(values, checkpoint_id=target, no_dist=True)
    return sorted(target.iterdir())
