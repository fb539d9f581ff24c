"""Writes the model of a run's checkpoint as transformers' `save_pretrained` does, under the names of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.checkpoint.stored import whole_tensor
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.read import SavedStep


def export_for_hub(step: SavedStep, target: Path, config: Path, shard: int) -> list[Path]:
    """Write configuration, tensors and index into the new folder ``target``, and return the files.

    config: a folder or file with the model's `config.json`. No code beside it runs. shard: bytes of tensors in a file.
    The whole model is in memory. Raises `MaterializeError` for a configuration of another model.
    """
    try:
        import transformers
    except ImportError:
        raise MaterializeError("there is no transformers", "install it, or export without --to hf") from None
    try:
        settings = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise MaterializeError(f"{config} has no configuration of a model: {error}", "name its config.json") from None
    name = (settings.architectures or ["no class"])[0]
    kind: Any = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise MaterializeError(f"{config} names {name}, which is no model of transformers", "name another config.json")
    stored = open_checkpoint(step.folder)  # looks at all bytes
    types = {each.dtype for each in stored.values() if each.dtype.is_floating_point}
    settings.dtype = max(types, key=lambda dtype: dtype.itemsize, default=torch.float32)
    with torch.device("meta"):
        model = kind(settings)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    kept = {key: tuple(each.shape) for key, each in stored.items()}
    if different := sorted(key for key in {*shapes, *kept} if shapes.get(key) != kept.get(key)):
        key = different[0]
        raise MaterializeError(
            f"`{key}` is {kept.get(key, 'missing')} in step {step.step}, and {shapes.get(key, 'missing')} in {name} of"
            f" {config}",
            "name the configuration of the model that was trained",
        )
    values = {key: whole_tensor(each) for key, each in stored.items()}
    for own in model._tied_weights_keys or ():
        values.pop(own, None) if settings.tie_word_embeddings else None
    model.save_pretrained(target, state_dict=values, max_shard_size=shard)
    return sorted(target.iterdir())
