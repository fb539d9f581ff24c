"""Section `fp8`: products in fp8 over grouped ones, in rows per second, and the errors of both."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gpu.claims import Bound, Claim, not_measured
from gpu.products import both_ways, counts_of
from gpu.setting import Setting, drawn, medians
from schedc.ir.plan import Products
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.products import PROVIDERS, RowGroups

CLAIMS = (
    Claim(
        "experts in fp8 are faster than grouped products in bf16",
        "capability 9 or 10; the sizes of `products`, routing by Zipf's law with 0.5",
        (Bound("fp8.over_grouped.scaled_grouped", ">=", 1.0),),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    experts = Experts(setting.experts, setting.width, setting.inner).to(setting.device, setting.dtype)
    counts = tuple(counts_of(setting, 0.5))
    rows, gates = drawn(setting, sum(counts), setting.width), drawn(setting, sum(counts), seed=1).float()
    ends = torch.tensor(counts, device=setting.device).cumsum(0, dtype=torch.int32)
    groups = RowGroups(counts, ends)
    modules = {}
    for name in ("grouped", "quantized", "scaled_grouped"):
        if PROVIDERS[name].available(experts.case()):
            modules[name] = copy.deepcopy(experts)
            modules[name].products = Products(name)
    exact = in_float64(experts, rows, counts, gates)
    times = medians(setting, {name: lambda m=each: both_ways(m, rows, groups, gates) for name, each in modules.items()})
    reason = PROVIDERS["scaled_grouped"].why_not(experts.case())
    return {
        "fp8": {
            "over_grouped": {name: times["grouped"] / each for name, each in times.items()}
            | ({"scaled_grouped": not_measured(reason)} if reason else {}),
            "error": {name: error(each(rows, groups, gates), exact) for name, each in modules.items()},
        }
    }


def in_float64(experts: Experts, rows: Tensor, counts: tuple[int, ...], gates: Tensor) -> Tensor:
    """[R, width] the outputs by the loop in float64."""
    wide = copy.deepcopy(experts).double()
    wide.products = Products("loop")
    with torch.no_grad():
        result: Tensor = wide(rows.double(), counts, gates.double())
    return result


def error(output: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of the exact outputs."""
    return float((output.detach().double() - exact).norm() / exact.norm())
