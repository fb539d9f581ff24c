"""Models for measures of the split backward, among them the layers that split it before autograd's nodes were used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decoder(nn.Module):
    """A decoder layer of the Llama kind: two norms, rotary positions, gated MLP, no biases."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        rows, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (part(h).view(rows, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        angle = torch.outer(torch.arange(tokens), 100.0 ** -torch.linspace(0, 1, q.shape[-1] // 2)).repeat(1, 2)
        q, k = (part * angle.cos() + _turned(part) * angle.sin() for part in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, tokens, width))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class InProjection(nn.Module):
    """Cross attention: torch cuts the packed weight of queries, keys and values into chunks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        return self.attention(x, x + 1, x + 2, need_weights=False)[0]  # type: ignore[no-any-return]


Put = Callable[[nn.Parameter, Tensor, Tensor], None]
"""Takes (weight, input, gradient of the output) of a layer, from which its gradient is computed later."""


class LayerOfBefore(nn.Linear):
    """A linear layer whose forward is replaced so that its weight gradient can wait: the split by class of layer."""

    put: Put

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self.weight, self.put)  # type: ignore[no-untyped-call, no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, put: Put) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight, ctx.put = weight, put
        return functional.linear(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        input_grad = flat.mm(weight).view(input.shape) if ctx.needs_input_grad[0] else None
        ctx.put(ctx.weight, input.detach(), flat)
        return input_grad, None, None


def replace_layers(model: nn.Module, put: Put) -> None:
    """Give every linear layer without a bias inside ``model`` the forward of before."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.bias is None:
            layer.__class__ = LayerOfBefore
            layer.put = put  # type: ignore[assignment]


def late_gradient(weight: nn.Parameter, input: Tensor, grad: Tensor) -> None:
    """W of the layer of before: add [out, in] the gradient of its weight. input: [..., in]. grad: [rows, out]."""
    gradient = grad.t().mm(input.reshape(-1, input.shape[-1]))
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
