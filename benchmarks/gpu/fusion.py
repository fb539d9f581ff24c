"""Section `fusion`: blocks with fused chains over the same blocks as they are: time of a step, and bytes held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.claims import Bound, Claim
from gpu.setting import Setting, drawn, medians, peak
from schedc.ir.plan import Level
from schedc.model.fusions import FUSIONS
from schedc_runtime.fusion.fused_forward import FusedForward
from schedc_runtime.fusion.fused_stages import request

_HEADS, _KEYS = 32, 8
_ROOT = (2 / torch.pi) ** 0.5
CONDITION = (
    "one dense block of width 4096 with 32 heads, 8 of keys, and a gated MLP of 11,008, 8,192 tokens in bf16; forward"
    " and backward"
)
CLAIMS = (
    Claim(
        "a block whose chains are kernels of torch.compile is faster than the block as it is",
        CONDITION,
        (Bound("fusion.block.compiled.speedup", ">=", 1.05),),
    ),
    Claim(
        "fused chains hold fewer bytes between forward and backward",
        CONDITION,
        (Bound("fusion.block.torch.peak", "<=", 0.95), Bound("fusion.block.compiled.peak", "<=", 0.95)),
    ),
)


class Block(nn.Module):
    """[batch, tokens, width] to the same, of the Llama kind, with dropout; written as models write it."""

    def __init__(self, width: int, inner: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.head = heads, keys, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(inner, width, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), cos, sin))
        y = self.norms[1](x)
        output: Tensor = x + self.dropout(self.down(functional.silu(self.gate(y)) * self.up(y)))
        return output

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query = turned(self.query(x).view(batch, tokens, self.heads, self.head).transpose(1, 2), cos, sin)
        key = turned(self.key(x).view(batch, tokens, self.keys, self.head).transpose(1, 2), cos, sin)
        value = self.value(x).view(batch, tokens, self.keys, self.head).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, repeated(key, self.heads), repeated(value, self.heads), is_causal=True
        )
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return joined


class Gelu(nn.Module):
    """[tokens, width] to the same: an MLP whose activation is written out, or has its bias beside it."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.bias, self.activation = nn.Parameter(torch.zeros(inner)), activation

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.activation(self.up(x), self.bias))
        return output


class Norm(nn.Module):
    """[..., width] to the same: RMSNorm as Hugging Face's models write it, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        output: Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return output


class Gathering(nn.Module):
    """[batch, tokens, width] to [2, batch * tokens, inner]: every token goes to two experts."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, width, inner) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        index = torch.arange(2 * len(rows), device=x.device) % len(rows)
        return torch.bmm(rows[index].view(2, len(rows), -1), self.weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, heads, tokens, d] rotated, as Hugging Face's models do."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def repeated(x: Tensor, heads: int) -> Tensor:
    """[batch, heads, tokens, d] of keys or values [batch, keys, tokens, d]."""
    batch, keys, tokens, head = x.shape
    copies = x[:, :, None, :, :].expand(batch, keys, heads // keys, tokens, head)
    return copies.reshape(batch, heads, tokens, head)


def tanh_written_out(x: Tensor, _bias: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def erf_written_out(x: Tensor, _bias: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5))


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias)


def fused(block: nn.Module, rows: tuple[str, ...], compiled: bool) -> nn.Module:
    """A copy of the block with the chains of ``rows`` fused."""
    block = copy.deepcopy(block)
    block.__dict__["forward"] = FusedForward(block, request("", block, Level.NONE, rows, compiled, {}))
    return block


def compared(setting: Setting, block: nn.Module, rows: tuple[str, ...], *inputs: Tensor) -> dict[str, Any]:
    """Time and peak of a forward and a backward: speed over the block as it is, and bytes over its bytes."""
    blocks = {"plain": block, "torch": fused(block, rows, False)}
    if setting.gpu:
        blocks["compiled"] = fused(block, rows, True)
    first, *rest = inputs

    def run(own: nn.Module) -> None:
        x = first.clone().requires_grad_()
        own(x, *rest).sum().backward()
        own.zero_grad()

    for own in blocks.values():
        run(own)  # makes code and kernels
    times = medians(setting, {name: lambda own=own: run(own) for name, own in blocks.items()})
    peaks = {name: peak(setting, lambda own=own: run(own)) for name, own in blocks.items()}
    found: dict[str, Any] = {"chains": chains(blocks["torch"])}
    for name in [name for name in blocks if name != "plain"]:
        found[name] = {"speedup": times["plain"] / times[name]}
        if setting.gpu:
            found[name]["peak"] = peaks[name] / peaks["plain"]
    return found


def chains(block: nn.Module) -> dict[str, int]:
    """The chains of a fused block that has run, by row."""
    (code,) = block.__dict__["forward"].codes.codes.values()
    return dict(code.chains) if code is not None else {}


def measure(setting: Setting) -> dict[str, Any]:
    width, inner, tokens = (4096, 11008, 8192) if setting.gpu else (128, 64, 16)
    x = drawn(setting, 2, tokens // 2, width)
    angle = drawn(setting, 1, 1, tokens // 2, width // _HEADS, seed=1)

    def of(block: nn.Module) -> nn.Module:
        return block.to(setting.device, setting.dtype)

    torch.manual_seed(0)
    block = of(Block(width, inner, _HEADS, _KEYS))
    whole = ("rope", "gated", "dropout_add", "gqa")
    entries = {"block": compared(setting, block, whole, x, angle.cos(), angle.sin())}
    entries |= {row: compared(setting, block, (row,), x, angle.cos(), angle.sin()) for row in whole}
    gelus = {"gelu_tanh": tanh_written_out, "gelu_erf": erf_written_out, "bias_gelu": with_bias}
    entries |= {row: compared(setting, of(Gelu(width, inner, act)), (row,), x) for row, act in gelus.items()}
    entries["rms_norm"] = compared(setting, of(Norm(width)), ("rms_norm",), x)
    entries["permute"] = compared(setting, of(Gathering(width, inner)), ("permute",), x)
    assert set(entries) == {"block", *FUSIONS}
    return {"fusion": {"width": width, "inner": inner, "tokens": tokens, **entries}}
