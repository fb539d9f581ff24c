"""Routes tokens to experts: top-k choices with their ties, and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc.ir.plan import Level
from schedc.step.costs.exchange import Routing
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.library import operation
from schedc_runtime.recompute.regions import keep, region

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}
_LEAST_SUM = 1e-20
"""Added to the divisor of weights: sigmoids may all be zero."""


@dataclass(frozen=True)
class RouterConfig(Routing):
    """How tokens choose ``top`` of ``experts``, and with what weight.

    scores: ``softmax`` over all experts (Mixtral, Qwen3-MoE) or ``sigmoid`` of each (DeepSeek-V3).
    normalise: the weights of a token sum to ``scale``. Otherwise weights are scores times ``scale``.
    groups, limit: group-limited routing. Experts form ``groups`` equal groups of consecutive ids. A token may use
        ``limit`` of them: those with the largest sum of their two best experts. Groups are nodes or ranks where
        experts are placed so (DeepSeek-V3, section 2.1.2).
    biased, bias_rate: a bias per expert enters the choice but not the weight. `balance.updated_bias` moves it by
        ``bias_rate`` against the load (Wang et al., 2024, loss-free balancing).
    balance: factor of the auxiliary loss (Fedus et al., 2021, section 2.2), see `balance.AuxiliaryLoss`.
    dtype: type in which scores are computed; default: the tokens' type, but at least float32.
    exact_logits: logits are computed in that type too (DeepSeek-V3), not in the tokens' type.
    """

    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    biased: bool = False
    bias_rate: float = 1e-3
    balance: float = 0.0
    dtype: torch.dtype | None = None
    exact_logits: bool = True

    def __post_init__(self) -> None:
        size, rest = divmod(self.experts, max(1, self.groups))
        findings = [
            (self.scores not in _SCORES, f"scores=`{self.scores}`", f"possible: {', '.join(_SCORES)}"),
            (
                not 1 <= self.top <= self.experts,
                f"top {self.top} of {self.experts} experts",
                "choose 1 <= top <= experts",
            ),
            (self.groups < 1 or rest > 0, f"{self.experts} experts in {self.groups} groups", "groups divide experts"),
            (
                not 1 <= self.limit <= self.groups,
                f"{self.limit} kept of {self.groups} groups",
                "choose 1 <= limit <= groups",
            ),
            (
                self.limit * size < self.top,
                f"top {self.top} of {self.limit} groups of {size} experts",
                "keep more groups or choose fewer experts",
            ),
        ]
        for wrong, message, help in findings:
            if wrong:
                raise RuntimeFault(message, help)


def choose_experts(scores: Tensor, top: int, groups: int = 1, limit: int = 1) -> Tensor:
    """[N, top] int64: the experts with the best of ``scores`` [N, experts], best first; among equals the lowest id."""
    if limit < groups:
        tokens, experts = scores.shape
        grouped = scores.view(tokens, groups, experts // groups)
        strength = grouped.topk(min(2, experts // groups), -1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, _best(strength, limit), True)
        scores = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(tokens, experts)
    return _best(scores, top)


_ID_BITS = 20
_MOST = 1 << _ID_BITS
"""More experts than this have no number in a key."""


def _best(scores: Tensor, top: int) -> Tensor:
    """[N, top] int64 ids of the best of [N, experts], in the order of (score descending, id ascending).

    `topk` chooses among equal scores as it likes, and differently on every device. So it gets whole numbers that are
    all different: the score's bits, ordered as the scores are, and below them the id, counted down.
    """
    experts = scores.shape[-1]
    if scores.dtype == torch.float64 or experts > _MOST:  # no room for both in 64 bits
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :top].contiguous()  # a view would hold it all
    bits = (scores.float() + 0.0).view(torch.int32)  # 0.0 makes -0.0 equal to 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = torch.arange(experts - 1, -1, -1, device=scores.device)
    keys = (rising.to(torch.int64) << _ID_BITS).add_(last).topk(top).values
    return (experts - 1) - (keys & (_MOST - 1))


def _chosen_by(scores: Tensor, bias: Tensor | None, top: int, groups: int, limit: int) -> Tensor:
    return choose_experts(scores if bias is None else scores + bias, top, groups, limit)


_choose = operation(
    "choose(Tensor scores, Tensor? bias, int top, int groups, int limit) -> Tensor", _chosen_by, "routing:launch_choose"
)


def _sums(scores: Tensor) -> Tensor:
    return scores.sum(-1, keepdim=True) + _LEAST_SUM


def _weigh(scores: Tensor, index: Tensor, normalise: bool, scale: float, shared: bool) -> list[Tensor]:
    weight = scores.gather(1, index)
    if normalise:
        weight = weight / _sums(weight)
    return [weight * scale, scores / _sums(scores)] if shared else [weight * scale]


def _weigh_backward(
    gradient: Tensor, of_shares: Tensor | None, scores: Tensor, index: Tensor, normalise: bool, scale: float
) -> Tensor:
    gradient = gradient * scale
    if normalise:
        gradient = _of_quotient(gradient, scores.gather(1, index))
    of_scores = torch.zeros_like(scores).scatter_add_(1, index, gradient)
    return of_scores if of_shares is None else _of_quotient(of_shares, scores) + of_scores


def _of_quotient(gradient: Tensor, scores: Tensor) -> Tensor:
    """[N, n] the gradient of scores that are divided by their sum, in the operations of autograd."""
    sums = _sums(scores)
    return gradient / sums + (-gradient * ((scores / sums) / sums)).sum(-1, keepdim=True)


_weights = operation(
    "weights(Tensor scores, Tensor index, bool normalise, float scale, bool shared) -> Tensor[]",
    _weigh,
    "weights:launch_weights",
)
_weights_backward = operation(
    "weights_backward(Tensor gradient, Tensor? of_shares, Tensor scores, Tensor index, bool normalise, float scale)"
    " -> Tensor",
    _weigh_backward,
    "weights:launch_weights_backward",
)


class _Weights(torch.autograd.Function):
    """The weights of choices, and the shares of all experts where they are ``shared``. Holds scores and choices."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, index: Tensor, normalise: bool, scale: float, shared: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scores, index)
        ctx.facts = normalise, scale
        ctx.set_materialize_grads(False)
        return tuple(_weights(scores, index, normalise, scale, shared))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_shares: Tensor | None = None) -> tuple[Tensor | None, ...]:
        scores, index = ctx.saved_tensors
        if gradient is None:
            gradient = scores.new_zeros(index.shape)
        return _weights_backward(gradient, of_shares, scores, index, *ctx.facts), None, None, None, None


class Router(nn.Module):
    """[N, width] tokens to (index [N, k] int64, weight [N, k], shares [N, experts]).

    shares: the scores of a token made to sum to 1, for the auxiliary loss. Gradients flow into weight and shares.
    """

    bias: Tensor | None

    def __init__(self, width: int, routing: RouterConfig) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, width))
        self.register_buffer("bias", torch.zeros(routing.experts) if routing.biased else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: normal, with a deviation of 1 over the root of the width. Biases are zero."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routed: tuple[Tensor, Tensor, Tensor] = region(Level.LIGHT, self._routed, tokens)
        return routed

    def _routed(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = self.routing
        wide = routing.dtype or torch.promote_types(tokens.dtype, torch.float32)
        if routing.exact_logits:
            logits = functional.linear(tokens.to(wide), self.weight.to(wide))
        else:
            logits = functional.linear(tokens, self.weight).to(wide)
        scores = _SCORES[routing.scores](logits)
        index: Tensor = keep(self._chosen, scores)
        shared = routing.scores != "softmax"
        weight, *shares = _Weights.apply(scores, index, routing.normalise, routing.scale, shared)  # type: ignore[no-untyped-call]
        return index, weight, shares[0] if shared else scores

    @torch.no_grad()
    def _chosen(self, scores: Tensor) -> Tensor:
        routing = self.routing
        chosen: Tensor = _choose(scores, self.bias, routing.top, routing.groups, routing.limit)
        return chosen
