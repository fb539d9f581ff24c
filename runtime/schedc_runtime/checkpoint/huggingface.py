"""Checkpoints of Hugging Face models: stored tensors under the names of the model, by transformers' own mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.checkpoint.stored import Stored, copy_rows
from schedc_runtime.errors import MaterializeError


def under_model_names(model: Any, names: Collection[str], stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """The tensors of a checkpoint under ``names``, those of the state of ``model``. Nothing is read.

    For models of transformers this is what ``from_pretrained`` would load: renamed, split and fused. A name that the
    checkpoint has and the model too stays as it is.
    """
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return stored
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # transformers before 5 loads the names as they are
        return stored
    known = dict.fromkeys(names, True)
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
    rename: Callable[..., tuple[str, str | None]] = partial(
        core_model_loading.rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=known
    )
    result: dict[str, Stored] = {}
    sources: dict[str, _Sources] = {}
    for key in sorted(stored, key=_natural):
        if key in known:
            result[key] = stored[key]
            continue
        name, pattern = rename(key, renamings, converters)
        if pattern is None:
            result.setdefault(name, stored[key])
            continue
        converter = next(each for each in converters if pattern in each.source_patterns)
        sources.setdefault(name, _Sources(converter, name, model, [])).tensors.append((key, pattern, stored[key]))
    for group in sources.values():
        result = {**group.targets(), **result}
    return result


@dataclass
class _Sources:
    """Stored tensors that one converter of transformers makes into ``name`` and possibly others.

    tensors: key, pattern of the converter, and tensor, in their order.
    """

    converter: Any
    name: str
    model: Any
    tensors: list[tuple[str, str, Stored]]

    def targets(self) -> dict[str, Stored]:
        """The tensors made of the stored ones, by name."""
        try:
            made = self.run(torch.device("meta"))
        except Exception as error:
            raise MaterializeError(
                f"transformers cannot make `{self.name}` of `{self.tensors[0][0]}` and {len(self.tensors) - 1} more:"
                f" {type(error).__name__}: {error}",
                "load and save the model once with transformers: save_pretrained writes a form that fits",
            ) from error
        return {name: _Converted(self, name, tuple(value.shape), value.dtype) for name, value in made.items()}

    def run(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors that are made, by name. On the meta device nothing is read."""
        converter = deepcopy(self.converter)
        for key, pattern, stored in self.tensors:
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
            if device.type != "meta":
                stored.read(tensor)
            converter.add_tensor(self.name, key, pattern, tensor)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, Sequence) else value for name, value in made.items()}


@dataclass(frozen=True)
class _Converted:
    """A tensor that transformers makes of stored tensors when it is read."""

    sources: _Sources
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        copy_rows(self.sources.run(torch.device("cpu"))[self.name], target, first)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sorts numbers in names as numbers: expert 2 before expert 10."""
    return [(0, int(part), "") if re.fullmatch("[0-9]{1,18}", part) else (1, 0, part) for part in key.split(".")]
