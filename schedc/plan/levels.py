"""Levels of recomputation in closed form: bytes that a layer holds per token, what each level saves, what it costs.

Per token and layer, with H columns of a token, F of an expert, E experts, k of them taken, s shared ones (as wide as
s experts side by side) and rows balanced between the ranks, a MoE layer holds, in numbers of the activations' type:

    attention   its input and output, query, key, value, and the input of what follows: 6 H
    norms       their outputs, in front of attention and of the experts: 2 H
    router      its scores: E numbers of 4 bytes
    rows        in the order of the experts, k H
    experts     out of the first product 2 k F, out of the activation k F, their outputs k H, for the gates' gradients
    shared      the same: 2 s F, and s F

The rows as they arrived are not held beside their copies in the order of the experts; a level that makes the copies
again, and does not dispatch again, holds the rows that arrived instead: `a` of them per token, k where every expert's
row travels alone. What is not counted: the logarithms of attention's sums, indexes, masks of dropout. Extra FLOPs are
those of products.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedc.plan.values import BYTES, Experts, Level

_SCORE = 4
"""Bytes of a score: routers compute in fp32."""


@dataclass(frozen=True)
class Saving:
    """Per token and MoE layer: bytes that are not held, and FLOPs that backward does once more."""

    bytes: float
    flops: int


def layer_bytes(experts: Experts, dtype: str) -> float:
    """Bytes that a MoE layer holds per token without recomputation."""
    held = _held(experts)
    return BYTES[dtype] * (6 * experts.hidden + sum(held.values())) + _SCORE * experts.count


def _held(experts: Experts) -> dict[str, float]:
    """Numbers per token, by what a level may leave out."""
    H, F, k, s = experts.hidden, experts.width, experts.top, experts.shared
    return {
        "norms": 2 * H,
        "activation": (k + s) * F,
        "rows": k * H,
        "first product": 2 * k * F,
        "shared": 2 * s * F,
        "outputs": k * H,
    }


_LEFT_OUT: dict[Level, tuple[str, ...]] = {
    Level.NONE: (),
    Level.NORM: ("norms",),
    Level.ACT: ("norms", "activation"),
    Level.LIGHT: ("norms", "activation", "rows"),
    Level.MEDIUM: ("norms", "activation", "rows", "first product", "shared"),
    Level.FULL: ("norms", "activation", "rows", "first product", "shared", "outputs"),
}
"""What each level does not hold, besides the scores of the router from `light` on."""
_PRODUCTS = {Level.MEDIUM: (4, 4), Level.FULL: (6, 4)}
"""FLOPs that are done once more, per column of a token and column of an expert: of a routed row, the first product or
both, and of a shared one, whose second product no gradient needs."""


def saving(experts: Experts, dtype: str, level: Level, arrive: float | None = None) -> Saving:
    """What a level saves and costs per token and MoE layer.

    arrive: rows that a rank gets per token of its own (`schedc.cost.exchange.arrivals`); by default ``top``.
    """
    held, names = _held(experts), _LEFT_OUT[level]
    routed = "rows" in names
    numbers = sum(held[name] for name in names)
    if routed and level is not Level.FULL:
        numbers -= experts.hidden * (experts.top if arrive is None else arrive)
    per_row, per_shared = _PRODUCTS.get(level, (0, 0))
    products = per_row * experts.top + per_shared * experts.shared
    flops = 2 * experts.hidden * experts.count * routed + products * experts.hidden * experts.width
    return Saving(BYTES[dtype] * numbers + _SCORE * experts.count * routed, flops)


def kept_share(experts: Experts | None, dtype: str, level: Level, arrive: float | None = None) -> float:
    """Share of a MoE layer's activations that a level holds; 1 where the sizes of the model are not known."""
    if experts is None or not experts.hidden or not experts.width:
        return 1.0
    return 1 - saving(experts, dtype, level, arrive).bytes / layer_bytes(experts, dtype)


def slot_bytes(experts: Experts, dtype: str) -> int:
    """Bytes of the weights of a hot expert, its three matrices, in a slot; their gradients take as many."""
    return 3 * experts.hidden * experts.width * BYTES[dtype]
