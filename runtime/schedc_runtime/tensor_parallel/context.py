"""Context parallelism: ranks share a sequence, and keys and values of all of its tokens are gathered in each attention.

    own tokens -> query, key, value -> gather of keys and values -> attention under a mask by places -> own tokens

Models of Transformers take an attention function by name. The one here gathers, makes the mask of the batch's places,
and calls the function that the model had. Own tokens lie anywhere in the sequence (`schedc_runtime.data.context`).

A ring sends as many bytes, n - 1 times a rank's keys and values, and holds fewer. It merges partial results by their
log-sums, which the functions of the models do not give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.example import CONTEXT, CU_SEQLENS
from schedc_runtime.partition.refusals import REGISTERED
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.tensor_parallel.attentions import replace_attentions, takes_function
from schedc_runtime.tensor_parallel.exchanges import Gather
from schedc_runtime.tensor_parallel.styles import Core
from schedc_runtime.tensor_parallel.varlen_kernel import attend, kernel_takes, run_keys

EXCHANGE = "context_exchange"
"""The name of the exchange in an attention."""
_NAME = f"{REGISTERED}context"
_MASKS, _RUNS = "_context_masks", "_context_runs"
"""Attributes of a batch's places: what all layers of a stage share."""


class GatherKeys(Gather):
    """Keys and values [B, heads, own, d] of all context ranks: [B, heads, S, d]. Gradients are added up."""

    label, dim = "keys", 2

    def __init__(self, group: ExpertGroup, plain: Callable[..., Any], boolean: bool) -> None:
        """plain: the attention function of the model. boolean: whether it takes masks of truth values."""
        super().__init__()
        self.group, self.plain, self.boolean = group, plain, boolean

    @property
    def lane(self) -> str:
        return "rail" if self.group.nodes > 1 else "node"


def open_attentions(model: nn.Module, cores: Sequence[Core], group: ExpertGroup) -> tuple[Core, ...]:
    """Let the attentions of a model gather keys and values of ``group``. Returns the cores, those attentions opened.

    Raises `RuntimeFault` for a model whose attention takes no function by name, and for other masks.
    """
    attentions = [core.path for core in cores if takes_function(model.get_submodule(core.path))]
    plain = replace_attentions(
        model, attentions, _NAME, context_attention, f"{group.size} context ranks",
        "take a dense model of Transformers, or Mesh(context=1)",
    )  # fmt: skip
    for each in plain:
        model.get_submodule(each.path).add_module(EXCHANGE, GatherKeys(group, each.call, each.boolean))
    return tuple(replace(core, exchanges=core.path in attentions) for core in cores)


def context_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    """An attention function of Transformers. query, key, value: [B, heads, own, d].

    options: with `CONTEXT` and, for a kernel that takes it, `CU_SEQLENS`, as of `context_rows`. Raises `PartitionError`
    for a batch without places, or with a mask.
    """
    places, exchange = options.pop(CONTEXT, None), module.get_submodule(EXCHANGE)
    begins = options.pop(CU_SEQLENS, None)
    assert isinstance(exchange, GatherKeys)
    group = exchange.group
    if places is None:
        raise PartitionError(
            f"no `{CONTEXT}` comes to {type(module).__name__}, and {group.size} context ranks share each sequence",
            "give what schedc_runtime.data.context.context_rows makes of packed rows. If the batch has it, the model's"
            " layers do not hand keywords to their attention: take Mesh(context=1)",
        )
    if attention_mask is not None or places.shape[-1] != group.size * query.shape[2]:
        raise PartitionError(
            f"{group.size} context ranks share each sequence, and the batch brings a mask of its own, or other places",
            f"give what schedc_runtime.data.context.context_rows makes of packed rows, with `{CONTEXT}`",
        )
    width = key.shape[-1]
    (whole,) = exchange(None, torch.cat((key, value), -1))
    own = slice(group.rank * query.shape[2], (group.rank + 1) * query.shape[2])
    window = options.get("sliding_window")
    if begins is not None and kernel_takes(exchange.boolean, query, value, options):
        if (runs := vars(places).get(_RUNS)) is None:
            runs = vars(places)[_RUNS] = run_keys(places, begins, own)
        whole = runs.of(whole)
        return attend(query, whole[..., :width], whole[..., width:], runs.lengths, window, options), None
    masks = vars(places).setdefault(_MASKS, {})
    mask = masks[window] = masks[window] if window in masks else context_mask(places, own, window)
    if not exchange.boolean:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    options["is_causal"] = False
    return exchange.plain(module, query, whole[..., :width], whole[..., width:], mask, **options)


def context_mask(places: Tensor, own: slice, window: int | None = None) -> Tensor:
    """[rows, 1, own, tokens] bool: whether an own token attends to one of all context ranks'.

    places: [rows, 2, tokens] first place of a token's document, and its own; as of `context_rows`. window: the last
    tokens that it attends to, with itself; None for all.
    """
    begins, place = places[:, 0], places[:, 1]
    back = place[:, own, None] - place[:, None, :]
    mask = (begins[:, own, None] == begins[:, None, :]) & (back >= 0)
    if window is not None:
        mask = mask & (back < window)
    return mask.unsqueeze(1)
