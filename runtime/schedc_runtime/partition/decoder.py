"""Partitions Hugging Face decoders, whose forward cannot be traced, without code per architecture.

A decoder is a module with ``embed_tokens``, ``layers`` and ``norm`` (Llama, Mistral, Qwen, Mixtral, DeepSeek and their
successors), with or without a language model head. Each stage calls its own part of these in order:

    first: embed_tokens     every: rotary_emb, masks, its layers     last: norm, lm_head

Rotary embeddings and masks depend only on sizes, positions and the padding mask. Every stage makes its own, so that
only the hidden state and these inputs travel. `partition_decoder` checks that the stages compute the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from schedc.layout.parts import Layout
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.balance import choose_cuts
from schedc_runtime.partition.blocks import parameter_count
from schedc_runtime.partition.graft import graft
from schedc_runtime.partition.result import Partition

_INPUTS = ("input_ids", "attention_mask", "position_ids")


def is_decoder(model: nn.Module) -> bool:
    """Whether ``model`` is a Hugging Face decoder, with or without a head."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__) and (
        _decoder_name(model) is not None
    )


def _decoder_name(model: nn.Module) -> str | None:
    """Qualified name of the part with the layers: "" or the base model of transformers."""
    for name in ("", str(getattr(model, "base_model_prefix", ""))):
        part = getattr(model, name, None) if name else model
        if isinstance(part, nn.Module) and all(hasattr(part, piece) for piece in ("embed_tokens", "layers", "norm")):
            return name
    return None


class DecoderStage(nn.Module):
    """Layers ``layers`` of a decoder. first: with the embedding before them. last: with norm and head after them.

    forward(hidden or input_ids, *others): others are attention_mask and position_ids, if the batch brings them, in the
    order of ``inputs``. Returns (hidden, *others). The last stage returns the logits, or without a head the hidden
    state.

    shape_only: leave the layers out, because they keep shape and dtype of the hidden state. Boundaries are inferred in
    this way: fake tensors have no values for routing, and some kernels refuse them.
    """

    shape_only = False

    def __init__(self, model: Any, inputs: Sequence[str], layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        prefix = _decoder_name(model)
        decoder = getattr(model, prefix) if prefix else model
        self.path = f"{prefix}." if prefix else ""
        self.config = decoder.config
        self.inputs, self.numbers, self.first, self.last = tuple(inputs), layers, first, last
        self.head = "lm_head" if prefix and last and hasattr(model, "lm_head") else None
        self.context = _Context(decoder.config, self.inputs, layers)
        names = [*(["embed_tokens"] if first else []), *(f"layers.{i}" for i in layers), *(["norm"] if last else [])]
        if hasattr(decoder, "rotary_emb") and len(layers):
            names.append("rotary_emb")
        for name in names:
            graft(self, self.path + name, decoder.get_submodule(name))
        if self.head:
            graft(self, self.head, model.lm_head)

    def part(self, name: str) -> nn.Module:
        """The decoder's submodule ``name``."""
        return self.get_submodule(self.path + name)

    def forward(self, hidden: Tensor, *others: Any) -> Any:
        if self.first:
            hidden = self.part("embed_tokens")(hidden)
        if len(self.numbers) and not self.shape_only:
            hidden = self._layers(hidden, others)
        if not self.last:
            return (hidden, *others)
        hidden = self.part("norm")(hidden)
        return self.get_submodule(self.head)(hidden) if self.head else hidden

    def _layers(self, hidden: Tensor, others: Sequence[Any]) -> Tensor:
        positions, masks = self.context(hidden, *others)
        shared: dict[str, Any] = {"position_ids": positions}
        if self.path + "rotary_emb" in dict(self.named_modules()):
            shared["position_embeddings"] = self.part("rotary_emb")(hidden, position_ids=positions)
        for index, number in enumerate(self.numbers):
            result = self.part(f"layers.{number}")(hidden, attention_mask=masks[index], **shared)
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden


class _Context(nn.Module):
    """Makes what the layers of a stage get besides the hidden state: (positions, masks), a mask or None per layer.

    It is a separate module because a stage is traced for its segments, and this code branches on its arguments.
    """

    def __init__(self, config: Any, inputs: Sequence[str], layers: range) -> None:
        super().__init__()
        self.config, self.inputs = config, tuple(inputs)
        kinds = getattr(config, "layer_types", None)
        self.kinds = [kinds[number] if kinds else None for number in layers]
        self.make_masks = _mask_function()

    def forward(self, hidden: Tensor, *others: Any) -> tuple[Tensor, tuple[Any, ...]]:
        named = dict(zip(self.inputs[1:], others, strict=True))
        positions = named.get("position_ids")
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        masks = self.make_masks(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=named.get("attention_mask"),
            past_key_values=None,
            position_ids=positions,
        )
        return positions, tuple([masks[kind] if isinstance(masks, dict) and kind else masks for kind in self.kinds])


def _mask_function() -> Any:
    """The function of transformers that makes the masks of a config: one mask, or one per kind of layer."""
    try:
        from transformers.masking_utils import create_masks_for_generate
    except ImportError as error:
        raise PartitionError(f"this version of transformers has no mask functions ({error})", "update it") from error
    return create_masks_for_generate


def partition_decoder(
    model: Any,
    stages: int,
    *,
    costs: Sequence[float] | None = None,
    split_points: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    layout: Layout | None = None,
) -> Partition:
    """`partition` for Hugging Face decoders. ``inputs`` may add attention_mask (2-D) and position_ids.

    Raises `PartitionError` if the adapter does not compute what the model's own forward does.
    """
    names = tuple(inputs or _INPUTS[:1])
    if unknown := [name for name in names if name not in _INPUTS]:
        raise PartitionError(f"inputs {unknown} of a Hugging Face decoder", f"possible here: {', '.join(_INPUTS)}")
    if names[0] != "input_ids":
        raise PartitionError(f"inputs={list(names)} of a Hugging Face decoder", "name input_ids first")
    path = _decoder_name(model)
    decoder = getattr(model, path) if path else model
    layers = [f"{path}.layers.{i}" if path else f"layers.{i}" for i in range(len(decoder.layers))]
    weights = [float(parameter_count(layer)) for layer in decoder.layers]
    head = parameter_count(decoder.norm) + (parameter_count(model.lm_head) if path and hasattr(model, "lm_head") else 0)
    parameters = [parameter_count(decoder.embed_tokens), *weights, head]
    cuts = choose_cuts(layers, parameters, stages, costs, split_points, layout)
    bounds = [0, *cuts, len(layers)]
    modules = tuple(
        DecoderStage(model, names, range(bounds[k], bounds[k + 1]), first=k == 0, last=k == stages - 1)
        for k in range(stages)
    )
    _check_equal(model, modules, names)
    values = (("hidden_states", *names[1:]),) * (stages - 1)
    return Partition(modules, names, values, tuple(tuple(layers[a:b]) for a, b in pairwise(bounds)))


def _check_equal(model: Any, modules: Sequence[nn.Module], inputs: Sequence[str]) -> None:
    """Raise `PartitionError` unless the stages compute the model's output on a few tokens, in evaluation mode."""
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return
    device = next(model.parameters()).device
    tokens = torch.arange(8, device=device).remainder(model.config.vocab_size).reshape(1, 8)
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(8, device=device)[None],
    }
    batch = {name: batch[name] for name in inputs}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            expected, second = (model(**batch, use_cache=False)[0] for _ in range(2))
            values: Any = tuple(batch.values())
            for module in modules:
                values = module(*values)
    finally:
        for module, mode in modes.items():
            module.training = mode
    # The same operations on the same values: equal, up to the difference of two runs of the model (atomic sums).
    if values.shape != expected.shape or _distance(values, expected) > 4 * _distance(second, expected):
        raise PartitionError(
            f"{type(model).__name__} computes more around its layers than embedding, rotary embedding, mask, norm and"
            " head: the stages do not give what the model gives",
            "write the model as nn.Sequential(first, *layers, last) with the missing steps in `first` and `last`",
        )


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
