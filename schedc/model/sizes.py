"""The sizes of a transformer that decide its parameters, FLOPs and bytes.

Nothing here says how a model is trained, or on what: microbatches, precision and levels belong to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from schedc.source import Source


class AttentionKind(StrEnum):
    """Where keys and values come from: heads of their own, or one narrow vector for all heads."""

    GQA = "gqa"
    """Grouped queries. With as many heads of keys as of queries it is multi-head attention."""
    MLA = "mla"
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""


class LayerKind(StrEnum):
    """What stands behind the attention of a layer."""

    DENSE = "dense"
    MOE = "moe"


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of attention, alike in all layers.

    heads, kv_heads: heads of queries, and those of keys and values. qk_dim: columns of a head of queries and keys,
    without ``rope_dim``. v_dim: columns of a head of values. q_lora, kv_lora: columns of the narrow vectors (MLA).
    rope_dim: columns beside ``qk_dim`` that only carry the position; all heads share those of keys (MLA).
    qkv_bias, out_bias: biases of the products in front of attention, and behind it. In MLA only products into narrow
    vectors have ``qkv_bias``. head_norms: norms of each head's query and key. wide_norms: norms of queries and keys of
    all heads at once. head_norm_weights: whether norms of heads have weights. sinks: a learned score per head.
    window: tokens that the layers in ``windowed`` look back; 0 for no such layers. chunked: they look back within
    chunks of so many tokens.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    kind: AttentionKind = AttentionKind.GQA
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    sinks: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    chunked: bool = False
    wide_norms: bool = False
    head_norm_weights: bool = True

    @property
    def score_dim(self) -> int:
        """Columns over which a score is summed."""
        return self.qk_dim + self.rope_dim


@dataclass(frozen=True)
class MoeSizes:
    """The sizes of MoE layers, and which layers these are.

    experts, top: routed experts; how many of them a token takes. width: columns between the products of an expert.
    groups, limit: the experts of a token lie in ``limit`` of ``groups`` equal parts. shared: experts that every token
    takes. first_dense: layers before the first MoE layer. every: behind them, layer i (from 0) has experts where i + 1
    is a multiple of ``every``. dense: numbers of further layers without experts. bias: whether router and experts have
    biases. router_bias, shared_bias: whether the router, and shared experts, have biases. shared_gate: whether a
    gate of one column weighs the shared experts.
    """

    experts: int
    top: int
    width: int
    groups: int = 1
    limit: int = 1
    shared: int = 0
    first_dense: int = 0
    every: int = 1
    dense: tuple[int, ...] = ()
    bias: bool = False
    router_bias: bool = False
    shared_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    layers: transformer layers, without those of ``mtp``. hidden: columns of a token. ffn: columns between the products
    of a dense MLP; 0 where no layer has one. gated: whether an MLP has two products in front of its activation.
    tied: whether the head uses the embedding. seq: tokens of a sequence, 0 where the file does not say them.
    mtp: layers that predict further tokens (multi-token prediction). norms: norms of a layer. unnormed: how many of the
    two inputs, of attention and of the MLP, have no normed copy of their own: 1 where both read one copy, 2 where norms
    stand behind both halves only. beside: whether attention and MLP read the same input. positions: learned positions.
    norm_weights: whether norms have weights. norm_bias, mlp_bias, head_bias: whether norms, dense MLPs and the head
    have biases. source: the text of the sizes.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: AttentionSizes
    ffn: int = 0
    gated: bool = True
    moe: MoeSizes | None = None
    mtp: int = 0
    tied: bool = False
    seq: int = 0
    norms: int = 2
    unnormed: int = 0
    beside: bool = False
    positions: int = 0
    norm_weights: bool = True
    norm_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    source: Source | None = field(default=None, compare=False, repr=False)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, from 0; layers of ``mtp`` follow, and are of the kind of the last one."""
        moe, layer = self.moe, min(layer, self.layers - 1)
        if moe is None or layer < moe.first_dense or (layer + 1) % moe.every or layer in moe.dense:
            return LayerKind.DENSE
        return LayerKind.MOE

    def window_of(self, layer: int) -> int:
        """Tokens that a layer looks back, itself included; 0 for all."""
        return self.attention.window if min(layer, self.layers - 1) in self.attention.windowed else 0

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """[layers] the kind of each layer."""
        return tuple(map(self.kind_of, range(self.layers)))

    def at(self, seq: int) -> ModelSizes:
        """The same model on sequences of ``seq`` tokens."""
        return replace(self, seq=seq)
