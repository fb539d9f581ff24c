"""Compares places where gates may enter an expert: behind its last product, inside SwiGLU, in front of its rows.

    python benchmarks/gate_places.py [--json] [--rows 4096] [--width 256] [--inner 512]

Behind: g (silu(X G) * (X U)) D, as the layers compute it. Inside: the kernel of SwiGLU takes the gates as its scale.
In front: `permute` takes them. Output and gradients of one expert, in float32 and bfloat16, from drawn numbers.

Printed: for each place the largest relative error, as norm over norm, against float64 behind the product. Beside it the
share of numbers with other bits than behind the product.
"""

from __future__ import annotations

from typing import Any

import torch
from figures import give, parser_of
from torch import Tensor
from torch.nn.functional import silu

PLACES = ("behind", "inside", "in front")


def step(place: str, dtype: torch.dtype, values: list[Tensor], gates: Tensor, grad: Tensor) -> list[Tensor]:
    """[6] output, and the gradients of rows, three matrices and gates. values: rows [R, C], [C, F] twice, [F, C]."""
    x, gate, up, down = leaves = [value.to(dtype).clone().requires_grad_() for value in values]
    g = gates.to(torch.promote_types(dtype, torch.float32)).clone().requires_grad_()
    rows = (x * g).to(dtype) if place == "in front" else x
    inner = silu(rows @ gate) * (rows @ up)
    output = (inner * g).to(dtype) @ down if place == "inside" else inner @ down
    output = (output * g).to(dtype) if place == "behind" else output
    torch.autograd.backward(output, grad.to(dtype))
    return [output.detach(), *(leaf.grad for leaf in (*leaves, g) if leaf.grad is not None)]


def benchmark(rows: int, width: int, inner: int) -> dict[str, Any]:
    """By dtype and place: error and share of other bits."""
    torch.manual_seed(0)
    draw = {"dtype": torch.float64}
    values = [torch.randn(rows, width, **draw)]  # type: ignore[call-overload]
    for inputs, outputs in ((width, inner), (width, inner), (inner, width)):
        values.append(torch.randn(inputs, outputs, **draw) / inputs**0.5)  # type: ignore[call-overload]
    gates, grad = torch.rand(rows, 1, **draw), torch.randn(rows, width, **draw)  # type: ignore[call-overload]
    exact = step("behind", torch.float64, values, gates, grad)
    figures: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        own = step("behind", dtype, values, gates, grad)
        for place in PLACES:
            here = step(place, dtype, values, gates, grad)
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(here, exact, strict=True)]
            other = sum(int((a != b).sum()) for a, b in zip(here, own, strict=True)) / sum(a.numel() for a in own)
            name = str(dtype).removeprefix("torch.")
            figures.setdefault(name, {})[place] = {"error": max(errors), "other_bits": other}
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    options = parser.parse_args()
    give(benchmark(options.rows, options.width, options.inner), options)


if __name__ == "__main__":
    main()
