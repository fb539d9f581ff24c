"""Chooses the provider of experts' products by the rows of an expert, as `schedc calibrate` measured them.

The rows of an expert are the mean over the experts of a rank: the number of rows over that of experts. Both are sizes
of tensors, so that the host asks the device for nothing. Where buffers are larger than their rows, as with `sizes
bounded`, the mean is that of the buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from schedc.ir.plan import Products
from schedc.step.costs.kernels import KernelBucket, KernelFamily
from schedc_runtime.moe.products import PROVIDERS, Case, Provider, provider_for

Kernels = tuple[KernelFamily, ...]


def family_of(kernels: Kernels, experts: int, case: Case) -> KernelFamily | None:
    """The family of a case's shape; None where nobody measured it. experts: those of the rank."""
    width, _, inner = case.columns
    shape = (experts, width, inner, str(case.dtype).removeprefix("torch."), case.padded)
    return next((family for family in kernels if family.shape == shape), None)


class MeasuredProducts:
    """The choice of a layer by the tables of a cost file. families: the tables."""

    def __init__(self, families: Kernels) -> None:
        self.families = families
        self._family: dict[tuple[int, Case], KernelFamily | None] = {}
        self._provider: dict[tuple[int, Case, int], Provider] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> MeasuredProducts:
        return self  # a copy of the layer makes the same choices

    def provider(self, products: Products, case: Case, rows: int, experts: int) -> Provider:
        """The provider of ``rows`` rows of so many experts: what ``products`` names, else that of the rows' bucket.

        Where nobody measured the shape it is the choice of `provider_for`. Raises `RuntimeFault` as that does.
        """
        if products.name != "auto" or not experts:
            return provider_for(products, case)
        if (experts, case) not in self._family:
            self._family[experts, case] = family_of(self.families, experts, case)
        family = self._family[experts, case]
        if family is None:
            return provider_for(products, case)
        bucket = family.bucket(-(-rows // experts))
        key = (experts, case, bucket.low)
        if key not in self._provider:
            self._provider[key] = _first_able(bucket, case)
        return self._provider[key]

    def told(self, experts: int, case: Case) -> str:
        """What `Pipeline.report` says of a layer: who multiplies how many rows; empty where nobody measured them."""
        family = family_of(self.families, experts, case)
        if family is None:
            return ""
        rows = ", ".join(f"{x.low}-{x.high} {_first_able(x, case).name}" for x in family.buckets)
        return f"by rows of an expert as measured: {rows}"


def _first_able(bucket: KernelBucket, case: Case) -> Provider:
    """The first provider of the bucket that can serve the case. Says once who cannot."""
    for name in bucket.order:
        if not (reason := PROVIDERS[name].why_not(case)):
            return PROVIDERS[name]
        _say_once(name, reason)
    return provider_for(Products(), case)


@cache
def _say_once(name: str, reason: str) -> None:
    message = f"the cost file's kernels name `{name}`, and the next that was measured runs: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def adding_alike(kernels: Iterable[KernelFamily], device: torch.device) -> Kernels:
    """The same families with only providers whose results have the loop's bits on a device.

    A bucket without any such provider has the loop.
    """
    return tuple(replace(family, buckets=tuple(_alike(x, device) for x in family.buckets)) for family in kernels)


def _alike(bucket: KernelBucket, device: torch.device) -> KernelBucket:
    names = [name for name in bucket.order if PROVIDERS[name].adds_alike(device)] or ["loop"]
    return replace(bucket, provider=names[0], times=tuple(x for x in bucket.times if x[0] in names))
