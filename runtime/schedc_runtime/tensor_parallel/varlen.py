"""Attention by documents: a kernel takes where packed documents begin, and computes nothing across them.

    rows [B, T] of documents   ->   one row of B * T tokens, and where each document begins (THD, ``cu_seqlens``)

Models of Transformers take an attention function by name. A mask leaves most products of a dense attention unused.
torch's `varlen_attn` computes those of documents alone. Where it cannot run, the model's own function takes a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.example import CU_SEQLENS
from schedc_runtime.partition.refusals import REGISTERED
from schedc_runtime.tensor_parallel.attentions import PlainAttention, replace_attentions, takes_function
from schedc_runtime.tensor_parallel.context import context_mask
from schedc_runtime.tensor_parallel.varlen_kernel import RunBegins, attend, flat, flat_lengths, kernel_takes

_NAME = f"{REGISTERED}documents"
_PLAIN = "documents_attention"


def attend_by_documents(model: nn.Module) -> None:
    """Let the attentions of a model of Transformers attend by documents, which batches of `thd_inputs` bring.

    Raises `RuntimeFault` for a model with a layer that does not take its attention function by name.
    """
    paths = [path for path, module in model.named_modules() if takes_function(module)]
    plain = replace_attentions(
        model, paths, _NAME, documents_attention, "attention by documents",
        "take a dense model of Transformers, or transformers_inputs: its attentions then make masks",
    )  # fmt: skip
    for each in plain:
        setattr(model.get_submodule(each.path), _PLAIN, each)


def documents_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    """An attention function of Transformers. query, key, value: [B, heads, T, d].

    options: with `CU_SEQLENS` [B, documents + 1]. Raises `PartitionError` without it, or with a mask.
    """
    begins = options.pop(CU_SEQLENS, None)
    if begins is None or attention_mask is not None:
        raise PartitionError(
            "attention by documents, and the batch does not say where documents begin, or brings a mask",
            "give what schedc_runtime.data.thd_inputs makes of packed rows",
        )
    plain: PlainAttention = getattr(module, _PLAIN)
    window = options.get("sliding_window")
    if kernel_takes(plain.boolean, query, value, options):
        tokens, runs = query.shape[2], flat_lengths(begins, query.shape[2])
        return attend(query, flat(key), flat(value), RunBegins(runs, runs, tokens, tokens), window, options), None
    mask = document_mask_of(begins, query.shape[2], window)
    if not plain.boolean:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    options["is_causal"] = False
    return plain.call(module, query, key, value, mask, **options)


def document_mask_of(begins: Tensor, tokens: int, window: int | None = None) -> Tensor:
    """[rows, 1, tokens, tokens] bool: whether a token attends to another. begins: [rows, documents + 1] as of
    `cumulative_lengths`. window: as of `context_mask`."""
    places = torch.arange(tokens, device=begins.device, dtype=begins.dtype).expand(len(begins), -1).contiguous()
    document = torch.searchsorted(begins[:, 1:].contiguous(), places, right=True)
    return context_mask(torch.stack((begins.gather(1, document), places), 1), slice(0, tokens), window)
