"""Calls torch's kernel for documents of any lengths (THD), and says where queries and keys of each begin.

    queries  | 0 0 | 1 1 1 |           one row of all tokens, and where each run of tokens begins
    keys     | 0 0 | 1 1 1 1 1 1 |     a run of a context rank attends to its document's tokens up to its own last one

Keys of a context rank's runs are copied, one run behind the other: each slice of a document attends to another part.
Shapes follow from those of the batch alone, so that the host waits for nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.device.choice import device_for

_TYPES = (torch.bfloat16, torch.float16)
_OTHERS = ("softcap", "s_aux", "position_bias")
"""Options of attentions that the kernel has not."""


def kernel_takes(boolean: bool, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the kernel computes what the model's own function would. boolean: as of a `PlainAttention`.

    query, value: [B, heads, T, d].
    """
    same = query.dtype in _TYPES and query.shape[-1] == value.shape[-1]
    alike = boolean and same and not options.get("dropout")
    others = any(options.get(name) is not None for name in _OTHERS)
    return alike and not others and query.device.type != "cpu" and not device_for(query.device).supports("triton")


class RunBegins(NamedTuple):
    """Where queries and keys of each run begin, and the last ones end: [runs + 1] int32. most: tokens of a run."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: RunBegins, window: int | None, options: dict[str, Any]
) -> Tensor:
    """[B, T, heads, d] of torch's kernel. query: [B, heads, T, d]. key, value: [keys, heads, d] of all rows.

    A run attends to its own keys, the last of which is that of its last query. window: as of `context_mask`.
    """
    kernel: Any = import_module("torch.nn.attention.varlen").varlen_attn
    rows, heads, tokens, _ = query.shape
    back = (-1 if window is None else window - 1, 0)
    mixed: Tensor = kernel(
        flat(query), key, value, lengths.queries, lengths.keys, lengths.most_queries, lengths.most_keys,
        scale=options.get("scaling"), window_size=back, enable_gqa=heads != key.shape[1],
    )  # fmt: skip
    return mixed.view(rows, tokens, *mixed.shape[1:])


def flat(heads: Tensor) -> Tensor:
    """[B * T, heads, d] one row of all tokens of [B, heads, T, d]."""
    return heads.transpose(1, 2).flatten(0, 1)


def flat_lengths(begins: Tensor, tokens: int) -> Tensor:
    """[rows * runs + 1] int32 where runs of rows, one behind the other, begin; the last is the end.

    begins: [rows, runs + 1] of each row of ``tokens``. A run that is not there has no tokens.
    """
    first = torch.arange(len(begins), device=begins.device, dtype=torch.int32).mul(tokens).unsqueeze(1)
    end = torch.full((1,), len(begins) * tokens, device=begins.device, dtype=torch.int32)
    return torch.cat(((begins[:, :-1] + first).flatten().int(), end))


class RunKeys(NamedTuple):
    """The keys of a context rank's runs, as copies of those of all tokens.

    copied: [keys] index of each among the tokens of all rows. beyond: [keys] bool, whether it is of no run.
    """

    lengths: RunBegins
    copied: Tensor
    beyond: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """[keys, heads, d] of [B, heads, tokens, d]. What is of no run is 0, and so is its gradient."""
        return flat(whole).index_select(0, self.copied).masked_fill(self.beyond[:, None, None], 0)


def run_keys(places: Tensor, begins: Tensor, own: slice) -> RunKeys:
    """The keys that each run of own tokens attends to: those of the document, up to the run's last token.

    places: [rows, 2, tokens] as of `context_rows`. begins: [rows, runs + 1] where runs of own tokens begin. own: where
    they lie among ``tokens``. What fills a rank up attends to as many copies of a token that fills up.

    A rank with 1/n of a document's tokens attends to n + 1/2 times as many, and up to n more for what does not divide.
    """
    (rows, _, tokens), size, runs = places.shape, own.stop - own.start, begins.shape[1] - 1
    first, end = begins[:, :-1].long(), begins[:, 1:].long()
    document, place = places[:, :, own].gather(2, (end - 1).clamp(min=0).unsqueeze(1).expand(-1, 2, -1)).unbind(1)
    fills = place < 0
    counts = torch.where(fills, end - first, place - document + 1) * (end > first)
    keys = functional.pad(counts.flatten().cumsum(0), (1, 0))
    at = torch.arange(rows * (tokens + -(-size // 2) + tokens // size * runs), device=places.device)
    run = torch.searchsorted(keys[1:], at, right=True).clamp(max=rows * runs - 1)
    beyond = at >= keys[-1]
    column = torch.where(beyond | fills.flatten()[run], tokens, document.flatten()[run] + at - keys[run])
    copied = run // runs * tokens + _tokens_by_place(places[:, 1])[run // runs, column]
    return RunKeys(RunBegins(flat_lengths(begins, size), keys.int(), size, tokens), copied, beyond)


def _tokens_by_place(place: Tensor) -> Tensor:
    """[rows, tokens + 1] the token of each place, and then one that fills a rank up. place: [rows, tokens]."""
    rows, tokens = place.shape
    there = torch.where(place < 0, tokens, place)
    numbers = torch.arange(tokens, device=place.device).expand(rows, -1)
    return torch.zeros(rows, tokens + 1, dtype=torch.int64, device=place.device).scatter_reduce(
        1, there, numbers, "amax"
    )
