"""The table of held tensors against what autograd saves of a block: norms of heads, and norms in each arrangement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from schedc.model.layer import Layer
from schedc.model.sizes import AttentionSizes, LayerKind, ModelSizes
from schedc.planner.model.families import BEHIND, IN_FRONT, ONE_BESIDE, SANDWICH, TWO_BESIDE, Arrangement

TOKENS, HIDDEN, HEADS, HEAD, INNER = 16, 24, 3, 8, 40


class _Block(nn.Module):
    """A gated block with an arrangement of norms. Optional are norms of heads, or over all of them."""

    def __init__(self, heads: str, arrangement: Arrangement) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(HIDDEN, HEADS * HEAD, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(HIDDEN)) for _ in range(4))
        columns = HEADS * HEAD if heads == "wide" else HEAD
        self.of_heads = nn.ParameterList(nn.Parameter(torch.rand(columns)) for _ in range(2))
        self.heads, self.arrangement = heads, arrangement
        self.register_buffer("turn", torch.rand(TOKENS, 1, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        if self.arrangement.beside:
            normed = _norm(x, self.norms[0])
            apart = normed if self.arrangement == ONE_BESIDE else _norm(x, self.norms[2])
            return x + self._attention(normed) + self._mlp(apart)
        x = x + self._behind(self._attention(self._in_front(x, self.norms[0])), self.norms[1])
        return x + self._behind(self._mlp(self._in_front(x, self.norms[2])), self.norms[3])

    def _mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(_gated(self.gate(x), self.up(x)))
        return result

    def _in_front(self, x: Tensor, weight: Tensor) -> Tensor:
        return x if self.arrangement == BEHIND else _norm(x, weight)

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (product(x) for product in self.into)
        if self.heads == "wide":
            query, key = _norm(query, self.of_heads[0]), _norm(key, self.of_heads[1])
        query, key, value = (each.view(TOKENS, HEADS, HEAD) for each in (query, key, value))
        if self.heads == "each":
            query, key = _norm(query, self.of_heads[0]), _norm(key, self.of_heads[1])
        heads = (each.transpose(0, 1)[None] for each in (query * self.turn, key * self.turn, value))
        result = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(result[0].transpose(0, 1).reshape(TOKENS, HEADS * HEAD))

    def _behind(self, x: Tensor, weight: Tensor) -> Tensor:
        return _norm(x, weight) if self.arrangement in (SANDWICH, BEHIND) else x


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


@pytest.mark.parametrize("heads", ["", "each", "wide"])
@pytest.mark.parametrize("arrangement", [IN_FRONT, SANDWICH, BEHIND, ONE_BESIDE, TWO_BESIDE])
def test_every_arrangement_of_norms_holds_what_the_table_says(heads: str, arrangement: Arrangement) -> None:
    """Beside it are the logarithms of attention's sums, a number of 4 bytes per head and token."""
    sizes = AttentionSizes(HEADS, HEADS, HEAD, HEAD, head_norms=heads == "each", wide_norms=heads == "wide")
    model = ModelSizes("block", 1, HIDDEN, 100, sizes, INNER, **arrangement._asdict())
    table = Layer(model, LayerKind.DENSE, "fp32").held()
    assert _saved(_Block(heads, arrangement)) / TOKENS == table + 4 * HEADS
