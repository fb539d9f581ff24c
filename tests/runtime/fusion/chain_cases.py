"""Blocks that have one chain of each row of the table of fusions, written as models write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc.ir.plan import Fuse, Level, Recompute
from schedc_runtime.fusion.fused_stages import FusedStages
from support.recompute_cases import block_stage

TOKENS, WIDTH, INNER, HEADS, KEYS, HEAD = 6, 8, 12, 4, 2, 4
P = 0.3


class Chain(nn.Module):
    """[TOKENS, WIDTH] to the same: two products in front of ``function``, one behind it."""

    def __init__(self, function: Callable[[Chain, Tensor, Tensor], Tensor], inner: int, second: int = 0) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, second or inner)
        self.bias, self.last = nn.Parameter(torch.randn(inner)), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.function(self, self.first(x), self.second(x)))
        return output


def rope(_: Chain, x: Tensor, y: Tensor) -> Tensor:
    """Rotated in one head, as Hugging Face's models do; x and y are queries and keys."""
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * 0.1 ** torch.arange(INNER // 2, device=x.device)
    cos, sin = (torch.cat((value, value), -1).to(x.dtype) for value in (angle.cos(), angle.sin()))

    def turned(v: Tensor) -> Tensor:
        return torch.cat((-v[..., v.shape[-1] // 2 :], v[..., : v.shape[-1] // 2]), dim=-1)

    return ((x * cos) + (turned(x) * sin)) * ((y * cos) + (turned(y) * sin))


def gated(_: Chain, x: Tensor, y: Tensor) -> Tensor:
    return y * functional.silu(x)


def gelu_tanh(_: Chain, x: Tensor, y: Tensor) -> Tensor:
    return y * (0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))))


def gelu_erf(_: Chain, x: Tensor, y: Tensor) -> Tensor:
    return y * (x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))))


def bias_gelu(block: Chain, x: Tensor, y: Tensor) -> Tensor:
    return y * functional.gelu(block.bias + x, approximate="tanh")


def dropout_add(block: Chain, x: Tensor, y: Tensor) -> Tensor:
    dropped: Tensor = block.dropout(x)
    return dropped + y


def gqa(_: Chain, x: Tensor, y: Tensor) -> Tensor:
    """Attention of 4 heads that share 2 heads of keys and values; as models without grouped attention do it."""
    tokens, copies = x.shape[-2], HEADS // KEYS
    query = x.reshape(-1, tokens, HEADS, HEAD).transpose(1, 2)
    pair = [part.reshape(-1, tokens, KEYS, HEAD).transpose(1, 2) for part in y.chunk(2, -1)]
    key, value = (
        part[:, :, None, :, :].expand(len(query), KEYS, copies, tokens, HEAD).reshape(len(query), HEADS, tokens, HEAD)
        for part in pair
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape)


def rms_norm(block: Chain, x: Tensor, y: Tensor) -> Tensor:
    raised = x.to(torch.float32)
    variance = raised.pow(2).mean(-1, keepdim=True)
    return y * (block.bias * (raised * torch.rsqrt(variance + 1e-6)).to(x.dtype))


class Stack(nn.Module):
    """Two experts, of which each token takes both: its rows are gathered, expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, INNER, INNER))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2 * len(x), device=x.device) % len(x)
        products = torch.bmm(x[index].view(2, len(x), INNER), self.weight)
        return products.sum(0)


class Gathering(Chain):
    """A chain in front of a product of experts."""

    def __init__(self) -> None:
        super().__init__(permute, INNER)
        self.experts = Stack()


def permute(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * x * block.experts(x)


BLOCKS: dict[str, Callable[[], Chain]] = {
    "rope": lambda: Chain(rope, INNER),
    "gated": lambda: Chain(gated, INNER),
    "gelu_tanh": lambda: Chain(gelu_tanh, INNER),
    "gelu_erf": lambda: Chain(gelu_erf, INNER),
    "bias_gelu": lambda: Chain(bias_gelu, INNER),
    "dropout_add": lambda: Chain(dropout_add, INNER),
    "gqa": lambda: Chain(gqa, HEADS * HEAD, 2 * KEYS * HEAD),
    "rms_norm": lambda: Chain(rms_norm, INNER),
    "permute": Gathering,
}
"""A block by the row whose chain it has."""
COLUMNS = {**dict.fromkeys(BLOCKS, INNER), "gqa": (HEADS - KEYS) * 2 * HEAD, "permute": 2 * INNER}
"""Columns of each chain, as the table counts them."""


def gradients(block: nn.Module, x: Tensor, seed: int = 3) -> dict[str, Any]:
    """The output of a block, and the gradients of its parameters and its input."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    output = block(x)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    block.zero_grad()
    output.backward(gradient)
    own = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": x.grad, **own}


def fused(block: nn.Module, *names: str, level: Level = Level.NONE) -> tuple[Any, FusedStages]:
    """A stage of the block, and its chains."""
    stage = block_stage([block], TOKENS, WIDTH, Recompute(level))
    return stage, FusedStages(Fuse(names), [stage], {})
