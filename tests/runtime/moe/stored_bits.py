"""Digests of a layer's outputs and gradients over small groups: what is stored in tests/data and must stay.

    python tests/runtime/moe/stored_bits.py > tests/data/route_bits.json     (with tests/ on the path)

Every operation here is exact or has one order, and random numbers are uniform ones. So the digests are the same on
every machine: experts scale rows, sums over rows run row by row, and rows have two numbers, whose sum has no order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.moe.exchange_cases import METHODS, Case, Data, run_in_process, within
from schedc_runtime.moe.counts import Method
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.transport.collective_calls import ordered_sum

STORED = Path(__file__).parents[2] / "data" / "route_bits.json"
NAMES = ("output", "dx", "dgates", "dweights")
GROUPS = {
    (1, 2): (5, 7), (1, 4): (6, 0, 9, 3), (4, 1): (4, 4, 4, 4), (2, 2): (9, 9, 9, 9),
    (2, 4): (5, 1, 0, 7, 6, 8, 2, 4), (4, 4): (6,) * 16,
}  # fmt: skip
"""(nodes, ranks of a node): tokens of each rank."""


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """(name, case) of every group, dropless and with a capacity."""
    for seed, ((nodes, per_node), tokens) in enumerate(GROUPS.items()):
        for capacity in (None, 2):
            name = f"{nodes}x{per_node}{'' if capacity is None else f', capacity {capacity}'}"
            yield name, Case(
                nodes, per_node, tokens, experts=64 if nodes * per_node == 16 else 16,
                top=8 if nodes * per_node == 16 else 4, width=2, capacity=capacity, dtype=dtype, seed=seed,
                expert=scaled_rows,
            )  # fmt: skip


def data(case: Case) -> Data:
    """Uniform inputs of very different sizes, so that another order of a sum has other bits."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5
        sizes = torch.randint(-6, 7, shape, generator=generator)
        return torch.ldexp(values, sizes).to(case.dtype)

    index = [
        torch.rand(n, case.experts, generator=generator, dtype=torch.float64).argsort(-1)[:, : case.top]
        for n in case.tokens
    ]
    if case.capacity is not None:
        index = [within(each, case.experts, case.capacity) for each in index]
    return Data(
        x=[random(n, case.width) for n in case.tokens],
        weights=[random(n, case.top).abs() for n in case.tokens],
        index=index,
        gradients=[random(n, case.width) for n in case.tokens],
        matrices=random(case.experts, case.width, case.width),
    )


def digests(dtype: torch.dtype, method: Method) -> dict[str, dict[str, str]]:
    """By case and tensor, a digest of all ranks' values. The sign of a zero does not count."""
    results = {}
    for name, case in cases(dtype):
        ranks = run_in_process(case, data(case), in_process_expert_groups(case.ranks, case.per_node), method)
        results[name] = {
            tensor: digest([rank.tensors[position] for rank in ranks]) for position, tensor in enumerate(NAMES)
        }
    return results


def stored(dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """The digests that the product had when every rank planned from everyone's choices, in numpy."""
    digests_of: dict[str, dict[str, dict[str, str]]] = json.loads(STORED.read_text())
    return digests_of[str(dtype).removeprefix("torch.")]


def digest(tensors: list[Tensor]) -> str:
    """A digest of the values, in order."""
    text = sha256()
    for tensor in tensors:
        text.update((tensor + 0.0).contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def scaled_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    """[R, 2] rows times the first row of a matrix [2, 2]."""
    output: Tensor = _Scaled.apply(rows, matrix)  # type: ignore[no-untyped-call]
    return output


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return rows * matrix[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, matrix = ctx.saved_tensors
        whole = torch.zeros_like(matrix)
        if len(rows):
            whole[0] = ordered_sum(grad * rows)
        return grad * matrix[0], whole


if __name__ == "__main__":
    print(json.dumps({str(dtype).removeprefix("torch."): digests(dtype, METHODS[0])
                      for dtype in (torch.float64, torch.float32)}, indent=1))  # fmt: skip
