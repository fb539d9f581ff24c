"""The table of held tensors against what autograd saves of a block with norms of heads and behind both halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from schedc.model.layer import Layer
from schedc.model.sizes import AttentionSizes, LayerKind, ModelSizes

TOKENS, HIDDEN, HEADS, HEAD, INNER = 16, 24, 3, 8, 40


class _Block(nn.Module):
    """A gated block. Optional are norms of heads in front of rotary positions, and norms behind attention and MLP."""

    def __init__(self, head_norms: bool, sandwich: bool) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(HIDDEN, HEADS * HEAD, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(HIDDEN)) for _ in range(4))
        self.of_heads = nn.ParameterList(nn.Parameter(torch.rand(HEAD)) for _ in range(2))
        self.head_norms, self.sandwich = head_norms, sandwich
        self.register_buffer("turn", torch.rand(TOKENS, 1, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._behind(self._attention(_norm(x, self.norms[0])), self.norms[1])
        normed = _norm(x, self.norms[2])
        return x + self._behind(self.down(_gated(self.gate(normed), self.up(normed))), self.norms[3])

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (product(x).view(TOKENS, HEADS, HEAD) for product in self.into)
        if self.head_norms:
            query, key = _norm(query, self.of_heads[0]), _norm(key, self.of_heads[1])
        heads = (each.transpose(0, 1)[None] for each in (query * self.turn, key * self.turn, value))
        result = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(result[0].transpose(0, 1).reshape(TOKENS, HEADS * HEAD))

    def _behind(self, x: Tensor, weight: Tensor) -> Tensor:
        return _norm(x, weight) if self.sandwich else x


class _Norm(torch.autograd.Function):
    """An RMS norm that saves its input, as fused kernels do; no figure per row is kept."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, weight.shape, weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.rms_norm(x, weight.shape, weight), (x, weight), gradient)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = _Norm.apply(x, weight)  # type: ignore[no-untyped-call]
    return normed


class _Gated(torch.autograd.Function):
    """silu(gate) up from both products alone, as fused kernels save it."""

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        gate, up = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), gradient)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def _saved(block: _Block) -> int:
    """Bytes of all storages that autograd saves, without parameters and positions."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.rand(TOKENS, HIDDEN, requires_grad=True))
    own = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *block.buffers())}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def test_norms_of_heads_and_behind_halves_hold_what_the_table_says() -> None:
    """Beside it are the logarithms of attention's sums, a number of 4 bytes per head and token."""
    for head_norms, sandwich in ((False, False), (True, False), (False, True), (True, True)):
        sizes = AttentionSizes(HEADS, HEADS, HEAD, HEAD, head_norms=head_norms)
        model = ModelSizes("block", 1, HIDDEN, 100, sizes, INNER, norms=4 if sandwich else 2)
        table = Layer(model, LayerKind.DENSE, "fp32").held()
        assert _saved(_Block(head_norms, sandwich)) / TOKENS == table + 4 * HEADS, (head_norms, sandwich)
