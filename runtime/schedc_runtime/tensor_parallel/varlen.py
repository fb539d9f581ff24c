"""Attention by documents: kernels that take where packed documents begin, and compute nothing across them.

    rows [B, T] of documents   ->   one row of B * T tokens, and where each document begins (THD, ``cu_seqlens``)

Models of Transformers take an attention function by name. A mask leaves most products of a dense attention unused.
torch's `varlen_attn` computes those of documents alone. Where it cannot run, the model's own function takes a mask.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.example import CU_SEQLENS
from schedc_runtime.partition.refusals import REGISTERED
from schedc_runtime.tensor_parallel.attentions import PlainAttention, replace_attentions, takes_function
from schedc_runtime.tensor_parallel.context import context_mask

_NAME = f"{REGISTERED}documents"
_PLAIN = "documents_attention"
_TYPES = (torch.bfloat16, torch.float16)
_OTHERS = ("softcap", "s_aux", "position_bias")
"""Options of attentions that the kernel has not."""


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
    if _kernel_takes(plain, query, value, options):
        return _by_kernel(module, query, key, value, begins, window, options), None
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


def _kernel_takes(plain: PlainAttention, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the kernel computes what the model's own function would."""
    same = query.dtype in _TYPES and query.shape[-1] == value.shape[-1]
    alike = plain.boolean and same and not options.get("dropout")
    others = any(options.get(name) is not None for name in _OTHERS)
    return alike and not others and query.device.type != "cpu" and not device_for(query.device).supports("triton")


def _by_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """[B, T, heads, d] of torch's kernel. A bound of lengths is the row, so that the host waits for nothing."""
    kernel: Any = import_module("torch.nn.attention.varlen").varlen_attn
    rows, _, tokens, _ = query.shape
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    lengths = flat_lengths(begins, tokens)
    back = (-1 if window is None else window - 1, 0)
    mixed: Tensor = kernel(
        query, key, value, lengths, lengths, tokens, tokens, scale=options.get("scaling"), window_size=back,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return mixed.view(rows, tokens, *mixed.shape[1:])


def flat_lengths(begins: Tensor, tokens: int) -> Tensor:
    """[rows * documents + 1] int32 where documents of rows, one behind the other, begin; the last is the end.

    begins: [rows, documents + 1] of each row of ``tokens``. A document that is not there has no tokens.
    """
    first = torch.arange(len(begins), device=begins.device, dtype=torch.int32).mul(tokens).unsqueeze(1)
    end = torch.full((1,), len(begins) * tokens, device=begins.device, dtype=torch.int32)
    return torch.cat(((begins[:, :-1] + first).flatten().int(), end))
