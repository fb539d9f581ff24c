"""Tells in lines for people what a pipeline has chosen by itself: who multiplies in each MoE layer, and why."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from schedc.plan import Attachments
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.products import passed_over


def report(modules: Iterable[nn.Module], plan: Attachments) -> str:
    """One line for each MoE layer of these stage modules, without repetitions; empty where there is none."""
    lines = [_products(name, layer, plan) for module in modules for name, layer in moe_layers(module)]
    return "\n".join(dict.fromkeys(lines))


def _products(name: str, layer: MoELayer, plan: Attachments) -> str:
    experts, padded = layer.experts, plan.capacity is not None
    case = experts.case(padded)
    chosen = experts.provider(padded)
    reasons = "".join(f"; not {better}: {reason}" for better, reason in passed_over(experts.products, case).items())
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{name}: products {chosen.name} ({dtype} on {case.device.type}){reasons}"
