"""Section `products`: rows per second of each provider over those of the loop, at even and uneven counts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gpu.claims import Bound, Claim
from gpu.setting import Setting, drawn, medians
from schedc.attachments.values import Products
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.products import PROVIDERS, RowGroups

CLAIMS = (
    Claim(
        "the best provider of experts' products gives more useful rows per second than a loop over experts",
        "32 experts of 7168 x 2048 in bf16, 32,768 rows, even, and by Zipf's law with 0.5 and 1.0; no padding counts",
        (Bound("products.useful_throughput", ">=", 1.15),),
    ),
)

CAPACITY = 1.25
"""Rows of an expert under `bmm`, over their mean."""


def measure(setting: Setting) -> dict[str, Any]:
    cases = [case(setting, skew) for skew in (0.0, 0.5, 1.0)]
    best = [max(value for name, value in each["over_loop"].items() if name != "loop") for each in cases]
    return {"products": {"useful_throughput": min(best), "cases": cases}}


def case(setting: Setting, skew: float) -> dict[str, Any]:
    """Rows per second of all providers that round nothing, over those of the loop. skew: exponent of Zipf's law."""
    torch.manual_seed(0)
    experts = Experts(setting.experts, setting.width, setting.inner).to(setting.device, setting.dtype)
    counts = counts_of(setting, skew)
    useful = sum(counts)
    rows, gates = drawn(setting, useful, setting.width), drawn(setting, useful, seed=1).float()
    ends = torch.tensor(counts, dtype=torch.int32, device=setting.device).cumsum(0, dtype=torch.int32)
    sizes, runs, reasons = {}, {}, {}
    for name, provider in PROVIDERS.items():
        padded = name == "bmm"
        if provider.rounds or (reason := provider.why_not(experts.case(padded))):
            reasons |= {} if provider.rounds else {name: reason}
            continue
        room = int(CAPACITY * useful / setting.experts) * setting.experts
        taken = drawn(setting, room, setting.width) if padded else rows
        groups = RowGroups() if padded else RowGroups(tuple(counts), ends)
        weights = drawn(setting, room, seed=1).float() if padded else gates
        module = copy.deepcopy(experts)
        module.products = Products(name)
        sizes[name] = min(useful, sum(min(each, room // setting.experts) for each in counts)) if padded else useful
        runs[name] = lambda module=module, x=taken, groups=groups, g=weights: both_ways(module, x, groups, g)
    times = medians(setting, runs)
    speed = {name: sizes[name] / times[name] for name in runs}
    return {
        "skew": skew,
        "rows": useful,
        "over_loop": {name: speed[name] / speed["loop"] for name in speed},
        "kept": {name: sizes[name] / useful for name in sizes},
        **({"not": reasons} if reasons else {}),
    }


def counts_of(setting: Setting, skew: float) -> list[int]:
    """[experts] rows of each expert by Zipf's law."""
    shares = torch.arange(1, setting.experts + 1, dtype=torch.float64) ** -skew
    rows = shares / shares.sum() * setting.tokens * setting.top
    return [int(count) for count in rows.round().long()]


def both_ways(module: Experts, rows: Tensor, groups: RowGroups, gates: Tensor) -> None:
    """Forward and backward."""
    module.zero_grad()
    rows = rows.detach().requires_grad_()
    module(rows, groups, gates).backward(torch.ones_like(rows))
