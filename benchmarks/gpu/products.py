"""Section `products`: rows per second of each provider, and of the choice by measured rows, over those of the loop."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.claims import Bound, Claim
from gpu.setting import Setting, drawn, layer_of, medians
from schedc.ir.plan import Products
from schedc.step.costs.kernels import KernelFamily, write_kernels
from schedc_runtime.measure.kernel_times import measure_kernels
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.kernels import MeasuredProducts
from schedc_runtime.moe.products import PROVIDERS, RowGroups

CLAIMS = (
    Claim(
        "the best provider of experts' products gives more useful rows per second than a loop over experts",
        "32 experts of 7168 x 2048 in bf16, 32,768 rows, even, and by Zipf's law with 0.5 and 1.0; no padding counts",
        (Bound("products.useful_throughput", ">=", 1.15),),
    ),
    Claim(
        "the provider that calibration chooses by rows is about as fast as the best one for the case",
        "the same experts, after `measure_kernels` up to their mean rows; providers that drop nothing",
        (Bound("products.chosen_over_best", ">=", 0.95),),
    ),
)

CHOSEN = "by_rows"
"""The name of the choice among the providers."""
CAPACITY = 1.25
"""Rows of an expert under `bmm`, over their mean."""


def measure(setting: Setting) -> dict[str, Any]:
    families = kernels(setting)
    cases = [case(setting, skew, families) for skew in (0.0, 0.5, 1.0)]
    best = [max(value for name, value in each["over_loop"].items() if name not in ("loop", CHOSEN)) for each in cases]
    return {
        "products": {
            "useful_throughput": min(best),
            "chosen_over_best": min(each["chosen_over_best"] for each in cases),
            "kernels": [line for line in write_kernels(families) if line],
            "cases": cases,
        }
    }


def kernels(setting: Setting) -> tuple[KernelFamily, ...]:
    """Who multiplies how many rows of these experts fastest, as `schedc calibrate` measures it."""
    layer = layer_of(setting)
    mean = setting.tokens * setting.top // setting.experts
    return measure_kernels(
        [layer], setting.device, lambda _: mean, warmup=1 + setting.gpu, repetitions=setting.repetitions
    )


def case(setting: Setting, skew: float, families: tuple[KernelFamily, ...]) -> dict[str, Any]:
    """Rows per second of all providers that round nothing, over those of the loop. skew: exponent of Zipf's law.

    families: by which rows choose.
    """
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
        run = partial(both_ways, module, taken, groups, weights)
        try:
            run()
        except RuntimeError as error:  # kernels that do not build here leave the other kernels' figures
            reasons[name] = f"failed: {(str(error).splitlines() or [''])[0]}"
            continue
        runs[name] = run
    chosen = copy.deepcopy(experts)
    chosen.measured = MeasuredProducts(families)
    groups = RowGroups(tuple(counts), ends)
    runs[CHOSEN] = lambda: both_ways(chosen, rows, groups, gates)
    sizes[CHOSEN] = useful
    times = medians(setting, runs)
    speed = {name: sizes[name] / times[name] for name in runs}
    return {
        "skew": skew,
        "rows": useful,
        "over_loop": {name: speed[name] / speed["loop"] for name in speed},
        "chosen_over_best": speed[CHOSEN] / max(speed[name] for name in runs if name not in ("bmm", CHOSEN)),
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
