"""Chains that become operations of our own, and norms that are written out as modules of their own."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.fusion.chain_cases import BLOCKS, TOKENS, WIDTH, fused, gradients
from schedc.ir.plan import Level


class Named(TorchDispatchMode):
    """Counts the operations of our own that a call runs, and those that a chain would run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += func.namespace == "schedc" or func._schema.name in ("aten::cat", "aten::pow")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("rope", {"schedc::rotate": 4}),
        ("rms_norm", {"schedc::rms_rows": 1, "schedc::rms_rows_backward": 1, "schedc::rms_rows_weight": 1}),
    ],
)
def test_a_chain_is_an_operation_with_a_kernel(name: str, operations: dict[str, int]) -> None:
    block = BLOCKS[name]()
    _, _ = fused(block, name)
    x = torch.randn(TOKENS, WIDTH)
    gradients(block, x)
    with Named() as watch:
        gradients(block, x)
    tables = {"aten::cat": 2, "aten::pow": 1} if name == "rope" else {}  # cosines and sines
    assert dict(+watch.seen) == operations | tables


class WrittenRMSNorm(nn.Module):
    """RMSNorm as Hugging Face's models have it."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.rand(WIDTH)), wide

    def forward(self, x: Tensor) -> Tensor:
        raised = x.to(self.wide)
        raised = raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * raised.to(x.dtype)


class Normed(nn.Module):
    """[TOKENS, WIDTH] to the same: a product on each side of a norm, and nothing else reads what the norm reads."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), WrittenRMSNorm(wide), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.first(x)))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_a_module_of_its_own_is_one_operation_with_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Normed()
    plain, x = copy.deepcopy(block).to(dtype), torch.randn(TOKENS, WIDTH, dtype=dtype)
    _, chains = fused(block.to(dtype))
    wanted, own = gradients(plain, x), gradients(block, x)
    assert chains.chains() == {"0": {"rms_norm": 1}}
    assert wanted.keys() == own.keys()
    assert all(torch.equal(value, own[key]) for key, value in wanted.items())


@pytest.mark.parametrize(
    ("block", "level"), [(Normed(), Level.NORM), (Normed(torch.float64), Level.NONE), (Normed().double(), Level.NONE)]
)
def test_a_norm_that_is_recomputed_or_sums_in_another_type_stays(block: nn.Module, level: Level) -> None:
    _, chains = fused(block, level=level)
    block(torch.randn(TOKENS, WIDTH, dtype=next(block.parameters()).dtype))
    assert chains.chains() == {"0": {}}
