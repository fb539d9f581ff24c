"""The tensors that a layer holds for its backward, one row each: columns, and the level that no longer holds it.

Everything that counts these bytes reads them here: levels of recomputation, the memory of a plan, and the planner. What
is left out is in `schedc.attachments.recompute_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from schedc.attachments.values import BlockSizes, Level


class LayerWidths(NamedTuple):
    """Columns of a token at every place of a layer; 0 for places that the layer does not have.

    hidden: columns of a token. queries, keys, values, results: columns of all heads together. narrow_query,
    narrow_keys: columns of the narrow vectors in front of their norms. rotary: columns of the narrow
    vector of keys beside that.
    normed_heads: columns of heads in front of norms of their own. behind: columns in front of norms that stand behind
    attention and MLP. inner, matrices: columns between the products of a dense MLP; its matrices. experts: routed
    experts. width: columns between the products of an expert. shared: the same of all shared experts together.
    """

    hidden: int
    queries: int
    keys: int
    values: int
    results: int
    narrow_query: int = 0
    narrow_keys: int = 0
    rotary: int = 0
    normed_heads: int = 0
    behind: int = 0
    inner: int = 0
    matrices: int = 3
    experts: int = 0
    width: int = 0
    shared: int = 0


class HeldTensor(NamedTuple):
    """A tensor that a layer holds.

    dropped: the first level that does not hold it; None where every level does. columns: numbers per token, or per row
    of an expert. scores: whether its numbers have 4 bytes in every precision.
    """

    name: str
    dropped: Level | None
    columns: Callable[[LayerWidths], int]
    scores: bool = False

    def held_at(self, level: Level) -> bool:
        """Whether a level holds it."""
        return self.dropped not in levels_up_to(level)


@cache
def levels_up_to(level: Level) -> frozenset[Level | None]:
    """The levels that a level includes, itself among them."""
    return frozenset(each for each in Level if each <= level)


ATTENTION = (
    HeldTensor("input", None, lambda x: x.hidden),
    HeldTensor("query", Level.LAYER, lambda x: x.queries),
    HeldTensor("key", Level.LAYER, lambda x: x.keys),
    HeldTensor("value", Level.LAYER, lambda x: x.values),
    HeldTensor("attention result", Level.LAYER, lambda x: x.results),
    HeldTensor("input of MLP", Level.LAYER, lambda x: x.hidden),
    HeldTensor("narrow query", Level.LAYER, lambda x: x.narrow_query),
    HeldTensor("narrow keys", Level.LAYER, lambda x: x.narrow_keys + x.rotary),
    HeldTensor("heads before norms", Level.LAYER, lambda x: x.normed_heads),
    HeldTensor("results before norms", Level.LAYER, lambda x: x.behind),
)
"""Per token: attention, and the inputs of both halves of a layer."""

NORMS = (
    HeldTensor("normed input", Level.NORM, lambda x: x.hidden),
    HeldTensor("normed input of MLP", Level.NORM, lambda x: x.hidden),
    HeldTensor("normed narrow query", Level.NORM, lambda x: x.narrow_query),
    HeldTensor("normed narrow keys", Level.NORM, lambda x: x.narrow_keys),
)
"""Per token: outputs of norms."""

DENSE = (
    HeldTensor("MLP activation", Level.ACT, lambda x: x.inner),
    HeldTensor("MLP products", Level.FULL, lambda x: (x.matrices - 1) * x.inner),
)
"""Per token of a dense layer."""

SHARED = (
    HeldTensor("shared activation", Level.ACT, lambda x: x.shared),
    HeldTensor("shared products", Level.MEDIUM, lambda x: 2 * x.shared),
)
ROUTER = (HeldTensor("router scores", Level.LIGHT, lambda x: x.experts, scores=True),)
"""Per token of a MoE layer, as are those of shared experts."""

ROWS = (
    HeldTensor("expert activation", Level.ACT, lambda x: x.width),
    HeldTensor("row", Level.LIGHT, lambda x: x.hidden),
    HeldTensor("expert products", Level.MEDIUM, lambda x: 2 * x.width),
)
"""Per row of an expert. Levels from `light` on that do not dispatch again hold the arrived rows in place of ``row``."""


def columns(tensors: Iterable[HeldTensor], widths: LayerWidths) -> int:
    """Columns of these tensors together."""
    return sum(tensor.columns(widths) for tensor in tensors)


def widths_of(block: BlockSizes, hidden: int) -> LayerWidths:
    """The columns of a dense layer, by the sizes of a plan. Without sizes of heads h d = hidden, and g = h."""
    h, d = block.heads_or(1), block.head_or(hidden)
    pairs = h if block.latent else block.keys or h
    return LayerWidths(
        hidden,
        h * (d + block.rotary),
        pairs * (d + block.rotary),
        pairs * d,
        h * d,
        block.query,
        block.latent,
        block.rotary if block.latent else 0,
        inner=block.inner,
        matrices=block.matrices,
    )
