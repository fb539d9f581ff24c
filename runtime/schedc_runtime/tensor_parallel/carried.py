"""Long sequences in segments: each attention carries keys and values to the segments behind it on its stage.

    own tokens -> query, key, value -> joined with those of earlier segments -> attention under a mask by places

Models of Transformers take an attention function by name, as for context ranks. The own past takes the place of a
neighbour's tokens. Attentions with latents (MLA) carry these, and make keys and values of all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.refusals import REGISTERED
from schedc_runtime.recompute.regions import keep
from schedc_runtime.stage.carries import SLOT, Carries, CarrySlot
from schedc_runtime.tensor_parallel.attentions import replace_attentions, takes_function
from schedc_runtime.tensor_parallel.context import context_mask

_NAME = f"{REGISTERED}carries"
_TOKENS = 2
"""The dimension of tokens in queries, keys, values [B, heads, own, d] and latents [B, 1, own, d]."""


def carry_attentions(model: nn.Module, segments: int) -> None:
    """Let the attentions of a model carry keys and values, once their stages say what they carry (`carries_of`).

    Raises `RuntimeFault` for a model with a layer that does not take its attention function by name.
    """
    paths = [path for path, module in model.named_modules() if takes_function(module)]
    if paths and all(SLOT in vars(model.get_submodule(path)) for path in paths):
        return  # another pipeline has made them
    plain = replace_attentions(
        model, paths, _NAME, carried_attention, f"sequences in {segments} segments",
        "take a model of Transformers without another state or cache, or a schedule without segments",
    )  # fmt: skip
    for path, call, boolean in plain:
        module: Any = model.get_submodule(path)
        latent = hasattr(module, "expand_kv")
        slot = CarrySlot(path, call, boolean=boolean, latent=latent)
        setattr(module, SLOT, slot)
        if latent:
            module.expand_kv = _Latents(module, slot)


class _Latents:
    """Makes keys and values of the latents of all tokens so far, in place of an attention's ``expand_kv``."""

    def __init__(self, module: nn.Module, slot: CarrySlot) -> None:
        self._module, self._slot = module, slot

    def __call__(self, latents: Tensor, rotated: Tensor) -> Any:
        """(keys, values) [B, heads, tokens so far, d] of latents and rotated keys [B, 1, own, d]."""
        kind: Any = type(self._module)
        if (carries := self._slot.running) is not None:
            latents = carries.joined(f"{self._slot.path} latents", latents, _TOKENS)
            rotated = carries.joined(f"{self._slot.path} rotated", rotated, _TOKENS)
        return kind.expand_kv(self._module, latents, rotated)


def carried_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    """An attention function of Transformers. query, key, value: [B, heads, own, d]; of latents all keys and values.

    options: with ``position_ids`` [B, own]. Raises `PartitionError` without them, or with a mask.
    """
    slot: CarrySlot = getattr(module, SLOT)
    positions = options.get("position_ids")
    if positions is None or positions.dim() != 2 or attention_mask is not None:
        raise PartitionError(
            f"`{slot.path}` attends over segments, and gets no position_ids [rows, tokens], or gets a mask",
            "take a model that gives position_ids [rows, tokens] to its attentions, and give it no mask",
        )
    carries = slot.running
    if carries is not None and not slot.latent:
        key = carries.joined(f"{slot.path} keys", key, _TOKENS)
        value = carries.joined(f"{slot.path} values", value, _TOKENS)
    window = options.get("sliding_window")
    mask = keep(_mask, carries, positions, query.shape[0], key.shape[_TOKENS], window)
    if not slot.boolean:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    options["is_causal"] = False
    return slot.plain(module, query, key, value, mask, **options)


def _mask(carries: Carries | None, positions: Tensor, rows: int, tokens: int, window: int | None) -> Tensor:
    """[rows, 1, own, tokens so far] bool: whether an own token attends to a token so far."""
    if carries is None:
        return _made(None, positions.expand(rows, -1), tokens, window)
    if window not in carries.masks:
        carries.masks[window] = _made(carries, positions.expand(rows, -1), tokens, window)
    return carries.masks[window]


def _made(carries: Carries | None, positions: Tensor, tokens: int, window: int | None) -> Tensor:
    """As `_mask`. positions: [rows, own]."""
    own = positions.shape[1]
    places = torch.arange(tokens, device=positions.device)
    begins = places[tokens - own :] - positions  # the first place of each own token's document
    if carries is not None:
        begins = carries.joined_once(f"begins of {window}", begins, 1)
    whole = torch.stack((begins, places.expand(len(begins), -1)), 1)
    return context_mask(whole, slice(tokens - own, tokens), window)
