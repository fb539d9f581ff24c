"""The table of fusions: chains of elementwise operations that run as one, and the bytes that each then does not hold.

A microbatch holds for its backward what autograd has saved. A fused chain saves its inputs and makes the rest again.
Counts are per token: C columns of a row and S bytes of a number; h heads of queries, g of keys, d columns of a head:

    rope         q cos + turn(q) sin      C: of a row of heads      0: only cos and sin are saved either way
    gated        silu(gate) up            C: inner columns          C S: silu(gate)
    gelu_tanh    written out, with tanh   C: inner columns          3 C S: x/2, tanh and 1 + tanh
    gelu_erf     written out, with erf    C: inner columns          2 C S: x/2, x/sqrt(2) and 1 + erf in place of x
    bias_gelu    gelu(x + bias)           C: inner columns          0: the sum is as large as x
    dropout_add  rest + dropout(x)        C: columns of a token     C (S - 1) on a CPU, whose masks are factors; else 0
    gqa          keys for each query      C: (h - g) 2 d            C S: the copies of keys and values
    rms_norm     RMSNorm written out      C: columns of a token     C S: the rows before the weight
    permute      rows to their experts    C: k times a token's      C S: the copies of a token for its k experts

A replacement whose ``exact`` is true has the bits of autograd. One that rounds otherwise has another sum of gradients,
or another formula of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from schedc.model.levels import Level
from schedc.model.sizes import AttentionKind, ModelSizes


@dataclass(frozen=True)
class Fusion:
    """A row of the table.

    meaning: the chain in words. exact: whether gradients keep their bits. numbers: numbers per column that are no
    longer held. mask: bytes per column that are held in their place, where the device keeps masks as factors.
    in_block: columns per token of the chain in a dense block, 0 where its sizes do not say that it has the chain; None
    where they cannot.
    """

    name: str
    meaning: str
    exact: bool
    numbers: int
    mask: int = 0
    in_block: Callable[[ModelSizes], int] | None = None

    def saved_bytes(self, columns: int, itemsize: int, masks_are_factors: bool = True) -> int:
        """Bytes per token that one chain of so many columns no longer holds. itemsize: bytes of a number."""
        if self.mask and not masks_are_factors:
            return 0
        return columns * (self.numbers * itemsize - self.mask)


def _inner(sizes: ModelSizes) -> int:
    return sizes.ffn if sizes.gated else 0


def _copies(sizes: ModelSizes) -> int:
    """Columns of the copies of keys and values. Keys from a narrow vector have a head for each query."""
    own = sizes.attention
    return 0 if own.kind is AttentionKind.MLA else (own.heads - own.kv_heads) * (own.qk_dim + own.v_dim)


FUSIONS = {
    row.name: row
    for row in (
        Fusion("rope", "rotary position embedding", exact=True, numbers=0),
        Fusion("gated", "silu of a gate times another product", exact=True, numbers=1, in_block=_inner),
        Fusion("gelu_tanh", "gelu by tanh, written out", exact=False, numbers=3),
        Fusion("gelu_erf", "gelu by erf, written out", exact=False, numbers=2),
        Fusion("bias_gelu", "gelu of a sum with a bias", exact=True, numbers=0),
        Fusion("dropout_add", "dropout and a residual sum, with a bias or without", exact=True, numbers=1, mask=1),
        Fusion("gqa", "keys and values repeated for the heads of queries", exact=False, numbers=1, in_block=_copies),
        Fusion("rms_norm", "RMSNorm written out, with a weight", exact=False, numbers=1),
        Fusion("permute", "rows of tokens gathered for a product of experts", exact=True, numbers=1),
    )
}
"""The rows by name."""

COMPILED = "compiled"
"""The provider that lets torch.compile make one kernel of each replacement; by default torch's operations run."""


def rows_of(names: Collection[str]) -> tuple[str, ...]:
    """The rows that a plan with these names asks for, in the order of the table; without names all."""
    return tuple(name for name in FUSIONS if not names or name in names)


def unfused_numbers(fused: Collection[str] | None, sizes: ModelSizes, level: Level) -> int:
    """Numbers per token that a dense layer holds because a plan names fusions, and leaves these out.

    Without a `fuse` line, ``fused`` is None and it is 0: sums over parts count the blocks of this package, which hold
    no copies of keys and no silu(gate).
    """
    if fused is None or level >= Level.LAYER:
        return 0
    return sum(
        row.in_block(sizes) * row.numbers * (name != "gated" or level < Level.FULL)
        for name, row in FUSIONS.items()
        if name not in fused and row.in_block is not None
    )
