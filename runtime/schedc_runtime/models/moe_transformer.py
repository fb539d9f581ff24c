"""A transformer in the shape of DeepSeek-V3 at any size, for examples and benchmarks of expert parallelism.

    tokens -> embedding -> dense blocks -> MoE blocks -> norm -> head -> logits
                                             |                    |
              tokens one later, embedded ----+-> MTP block -> norm +-> logits of the token after the next

Latent attention, rotary positions on a part of each head, gated MLPs, a shared expert beside the routed ones, and
multi-token prediction (DeepSeek-AI, 2024, DeepSeek-V3, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc_runtime.data.documents import IGNORED, document_mask
from schedc_runtime.kernels.heads import heads_of_latents
from schedc_runtime.kernels.norm import OneLaunchRMSNorm
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a `MoETransformer`.

    inner, expert_inner: inner sizes of the dense MLPs and of each routed expert.
    shared: inner size of the shared expert as a number of routed experts; 0: no shared expert.
    query_rank, key_value_rank: widths to which attention compresses queries, and keys with values.
    plain, rotary, value: columns per head of queries and keys without and with positions, and of values.
    multi_token: also predict the token after the next. tied: this prediction uses the model's own embedding. A pipeline
        then needs the first and the last stage on one rank, as in a V placement.
    predictions: number of predictions that layouts place: blocks behind the others, for which the model embeds.
    """

    vocab: int = 128
    width: int = 64
    heads: int = 4
    dense_blocks: int = 1
    moe_blocks: int = 3
    inner: int = 128
    expert_inner: int = 16
    shared: int = 1
    routing: RouterConfig = field(
        default_factory=lambda: RouterConfig(
            experts=32, top=8, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True, balance=1e-4
        )
    )
    query_rank: int = 32
    key_value_rank: int = 16
    plain: int = 16
    rotary: int = 8
    value: int = 16
    dropout: float = 0.0
    multi_token: bool = False
    predictions: int = 0
    tied: bool = False


class LatentAttention(nn.Module):
    """[batch, tokens, width] to the same: attention whose keys and values come from a narrow latent vector.

    It is causal, or as a mask [batch, 1, tokens, tokens] allows. Rotary positions count from the row's first token:
    products of queries and keys depend on differences of positions alone (Su et al., 2021, RoFormer, section 3.2).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        c = self.config = config
        self.query_down = nn.Linear(c.width, c.query_rank, bias=False)
        self.query_norm = OneLaunchRMSNorm(c.query_rank)
        self.query_up = nn.Linear(c.query_rank, c.heads * (c.plain + c.rotary), bias=False)
        self.latent_down = nn.Linear(c.width, c.key_value_rank + c.rotary, bias=False)
        self.latent_norm = OneLaunchRMSNorm(c.key_value_rank)
        self.latent_up = nn.Linear(c.key_value_rank, c.heads * (c.plain + c.value), bias=False)
        self.out = nn.Linear(c.heads * c.value, c.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        c = self.config
        batch, tokens, _ = x.shape
        query = self.query_up(self.query_norm(self.query_down(x)))
        latent, turned = self.latent_down(x).split((c.key_value_rank, c.rotary), -1)
        pair = self.latent_up(self.latent_norm(latent))
        heads = pair.shape[-1] // (c.plain + c.value)  # a tensor rank has a part of all heads
        query, key, value = heads_of_latents(query, turned, pair, heads, c.plain)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return joined


class MoeBlock(nn.Module):
    """[batch, tokens, width] to the same: attention, then a dense MLP or a `MoELayer`.

    Both come after a norm and have a residual connection around them. mask: as of `LatentAttention`.
    """

    def __init__(self, config: MoEConfig, *, dense: bool) -> None:
        super().__init__()
        self.attention_norm = OneLaunchRMSNorm(config.width)
        self.attention = LatentAttention(config)
        self.mlp_norm = OneLaunchRMSNorm(config.width)
        self.mlp: nn.Module = GatedMLP(config.width, config.inner) if dense else moe_block(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


def moe_block(config: MoEConfig) -> MoELayer:
    """The expert layer of ``config`` with all experts; `shard_experts` shards them."""
    routing = config.routing
    return MoELayer(
        Router(config.width, routing),
        Experts(routing.experts, config.width, config.expert_inner),
        GatedMLP(config.width, config.shared * config.expert_inner) if config.shared else None,
    )


class MultiToken(nn.Module):
    """[batch, tokens, width] hidden states to [batch, tokens - 1, width], which predict one token further.

    mask: as of `LatentAttention`, [batch, 1, tokens - 1, tokens - 1].
    embeds: whether it takes tokens [batch, tokens] and embeds them itself; else it takes the embedded next tokens
    [batch, tokens - 1, width].
    """

    def __init__(self, config: MoEConfig, *, embeds: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width) if embeds else None
        self.hidden_norm = OneLaunchRMSNorm(config.width)
        self.token_norm = OneLaunchRMSNorm(config.width)
        self.join = nn.Linear(2 * config.width, config.width, bias=False)
        self.block = MoeBlock(config, dense=not config.moe_blocks)
        self.norm = OneLaunchRMSNorm(config.width)

    def forward(self, hidden: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        following = self.token_norm(tokens if self.embedding is None else self.embedding(tokens[:, 1:]))
        x = self.join(torch.cat((self.hidden_norm(hidden[:, :-1]), following), -1))
        output: Tensor = self.norm(self.block(x) if mask is None else self.block(x, mask))
        return output


class MoETransformer(nn.Module):
    """[batch, tokens] int64 to logits [batch, tokens, vocab]. Cut into stages at its ``blocks``.

    With multi-token prediction the result is a pair. The second element, [batch, tokens - 1, vocab], predicts the token
    after the next. With ``predictions`` the result is a tuple, whose element k is [batch, tokens - k, vocab].
    ``documents`` of packed rows keep attention inside of documents, as those of `models.gpt.GPT` do.
    """

    _tp_plan: ClassVar = {
        "embedding": "embedding_rowwise",
        "blocks.*.attention.query_up": "colwise",
        "blocks.*.attention.latent_down": "mla_kv_a_proj",
        "blocks.*.attention.latent_up": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }
    """How tensor ranks split the model, in the styles of Transformers. Experts and shared experts stay whole."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        kinds = [True] * config.dense_blocks + [False] * config.moe_blocks
        self.blocks = nn.ModuleList([MoeBlock(config, dense=dense) for dense in kinds])
        self.norm = OneLaunchRMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.multi_token = MultiToken(config) if config.multi_token else None
        if self.multi_token is not None and self.multi_token.embedding is not None and config.tied:
            self.multi_token.embedding.weight = self.embedding.weight
        self.predictions = nn.ModuleList([MultiToken(config, embeds=False) for _ in range(config.predictions)])

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Any:
        masks = () if documents is None else (document_mask(documents),)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *masks)
        logits = self.head(self.norm(x))
        if self.predictions:
            outputs = [logits]
            for number, prediction in enumerate(self.predictions, 1):
                x = prediction(
                    x, self.embedding(tokens[:, number:]), *(mask[..., :-number, :-number] for mask in masks)
                )
                outputs.append(self.head(x))
            return tuple(outputs)
        if self.multi_token is None:
            return logits
        return logits, self.head(self.multi_token(x, tokens, *(mask[..., :-1, :-1] for mask in masks)))


def losses_of_outputs(predictions: int, factor: float = 0.3) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    """[predictions + 1] a loss for each output of a model with ``predictions``; ``factor`` weighs all but the first.

    Function k takes logits [batch, tokens - k, vocab] and targets [batch, tokens].
    """

    def of(number: int) -> Callable[[Tensor, Tensor], Tensor]:
        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, number:].flatten())
            return loss * factor if number else loss

        return loss_fn

    return tuple(map(of, range(predictions + 1)))


def multi_token_loss(factor: float = 0.3) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    """A loss for multi-token prediction: that of the next token plus ``factor`` times that of the token after it.

    The loss function takes logits [batch, tokens, vocab] and [batch, tokens - 1, vocab], and targets [batch, tokens].
    The token behind one without a target belongs to another document, and is not predicted from it.
    """

    def loss_fn(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, further = output
        first = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        after = torch.where(targets[:, :-1] == IGNORED, IGNORED, targets[:, 1:])
        return first + factor * functional.cross_entropy(further.flatten(0, 1), after.flatten())

    return loss_fn
