"""Numbers of the Triton kernels beside those of the loop: on a GPU, or in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/runtime/moe/triton_cases.py      (the variable decides when Triton is first loaded)

The interpreter multiplies the bits of bfloat16, and cuts where a device rounds.
"""

from __future__ import annotations

import json

import torch

from schedc_runtime.moe.products import PROVIDERS, Case, RowGroups

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""By dtype: the largest error of a product, over its norm."""


def wrong(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The products that are too far from the loop's in float64, or have other strides than their weights."""
    if reason := PROVIDERS["triton"].why_not(Case(device, dtype, (40, 72, 36), False)):
        return [reason]
    findings = []
    for counts, turned in (((5, 0, 70), False), ((0, 33, 1), True), ((0, 0), False)):
        torch.manual_seed(0)
        rows, grads = torch.randn(sum(counts) + 3, 40), torch.randn(sum(counts) + 3, 72)
        weight = torch.randn(len(counts), 72, 40).transpose(1, 2) if turned else torch.randn(len(counts), 40, 72)
        groups = RowGroups(counts)
        for what, left, right in (("F", rows, weight), ("I", grads, weight.transpose(1, 2)), ("W", rows, grads)):
            narrow = [x.to(device, dtype) for x in (left, right, weight)]
            exact = PROVIDERS["loop"].multiply(*(x.double() for x in narrow[:2]), groups, narrow[2].double())
            product = PROVIDERS["triton"].multiply(*narrow[:2], groups, narrow[2])
            filled = len(product) if right is grads else sum(counts)
            error = (product[:filled] - exact[:filled]).norm()
            if not error <= BOUNDS[dtype] * exact[:filled].norm():
                findings.append(f"{what} of {counts} rows in {dtype}: {float(error)} off")
            if right is grads and product.stride() != weight.stride():
                findings.append(f"{what} of {counts} rows in {dtype}: strides {product.stride()}")
    return findings


if __name__ == "__main__":
    print(json.dumps([x for dtype in (torch.float32, torch.float16) for x in wrong(torch.device("cpu"), dtype)]))
