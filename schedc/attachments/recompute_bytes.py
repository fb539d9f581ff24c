"""Levels of recomputation in closed form: bytes that a layer holds per token, bytes that a level saves, its FLOPs.

`schedc.model.parts` has the tensors. By default rows are balanced between the ranks.

The arrived rows are not held beside their copies in the order of the experts. A level that recomputes the copies, but
does not dispatch a second time, holds the arrived rows instead: `a` per token, which is k where every expert's row
travels alone. Not counted are the logarithms of attention's sums, indexes, and masks of dropout. Extra FLOPs are those
of products.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedc.attachments.block_counts import attention_bytes, attention_flops
from schedc.attachments.parameter_counts import expert_parameters
from schedc.attachments.plan_parts import moe_parts
from schedc.ir.plan import By, ExpertSizes, Level, Recompute, bytes_per_number
from schedc.model.counts import part_bytes, product_flops
from schedc.model.parts import PartName


@dataclass(frozen=True)
class Saving:
    """Bytes that are not held and FLOPs that are recomputed, per token and MoE layer."""

    bytes: float
    flops: int


@dataclass(frozen=True)
class RowsPerToken:
    """Rows of a rank per token of its own. experts: rows that its experts compute. arrive: rows of the last hop."""

    experts: float
    arrive: float


_BESIDE = 36
"""Bytes per row that no level saves: at most four indexes for its way, and its gate."""


def held_bytes(
    experts: ExpertSizes,
    dtype: str,
    level: Level = Level.NONE,
    of_rows: Level | None = None,
    rows: RowsPerToken | None = None,
) -> float:
    """Bytes that a MoE layer holds per token.

    of_rows: level of the routed experts; by default ``level``. rows: by default those of balanced ranks, each of which
    travels alone.
    """
    of_rows, rows = of_rows or level, rows or RowsPerToken(experts.top, experts.top)
    parts = moe_parts(experts)
    norms, shared, scores = (
        part_bytes(parts[name], level, dtype) for name in (PartName.NORMS, PartName.SHARED, PartName.ROUTER)
    )
    computed, arrived = (part_bytes(parts[PartName.EXPERTS], of_rows, dtype, per) for per in ("row", "arrived"))
    attention = attention_bytes(experts.block, experts.hidden, dtype, level)
    return attention + (norms + shared + rows.experts * computed + rows.arrive * arrived) + scores


def held_by_role(experts: ExpertSizes, dtype: str, level: Level = Level.NONE, filled: float = 1.0) -> dict[str, float]:
    """Bytes that a MoE layer holds per token, by role of its segments; they add up to `held_bytes` at as many rows.

    Attention has its own norms, those of the experts, and the router. Experts have their rows as they arrive.
    """
    rows = experts.top * filled
    whole = held_bytes(experts, dtype, level, rows=RowsPerToken(rows, rows))
    shared = part_bytes(moe_parts(experts)[PartName.SHARED], level, dtype)
    others = whole - held_bytes(experts, dtype, level, rows=RowsPerToken(0, 0))
    return {"attention": whole - others - shared, "shared": shared, "experts": others}


def layer_bytes(experts: ExpertSizes, dtype: str, filled: float = 1.0) -> float:
    """Bytes that a MoE layer holds per token without recomputation.

    filled: rows of buffers over those of balanced ranks, as in all functions here.
    """
    rows = experts.top * filled
    return held_bytes(experts, dtype, rows=RowsPerToken(rows, rows))


def adaptive_bytes(experts: ExpertSizes, dtype: str, plan: Recompute, most: RowsPerToken) -> float:
    """Bytes that a MoE layer holds per token under an adaptive ``plan`` in the worst case, ``most`` rows.

    Rows are held up to the threshold. Above it, a group holds none, and a rank alone holds what the level leaves.
    """
    assert plan.adaptive is not None
    up_to = RowsPerToken(min(plan.adaptive * experts.top, most.experts), most.arrive)
    held = held_bytes(experts, dtype, rows=up_to)
    if plan.by is By.RANK:
        held = max(held, held_bytes(experts, dtype, Level.NONE, plan.level, most))
    return held + _BESIDE * most.experts


def whole_bytes(experts: ExpertSizes, dtype: str, most: RowsPerToken) -> float:
    """Bytes per token of a MoE layer with ``most`` rows that holds everything: in its backward, or after its R."""
    arrived = bytes_per_number(dtype) * experts.hidden * most.arrive
    return held_bytes(experts, dtype, Level.NONE, Level.NONE, most) + arrived + _BESIDE * most.experts


def output_gradient_bytes(experts: ExpertSizes, dtype: str, rows: float) -> float:
    """Bytes per token of the gradients of ``rows`` outputs of experts, which W needs."""
    return bytes_per_number(dtype) * experts.hidden * rows


def passing_bytes(experts: ExpertSizes, dtype: str, most: RowsPerToken) -> float:
    """Bytes per token of the temporaries while ``most`` rows run through a layer, forward or backward.

    They add to `whole_bytes`: gradients of the arrived rows, and three of the rows (outputs with and without gates,
    gradients of inputs). There are also gradients of both products and the activation, and two temporaries of the
    latter.
    """
    H, F = experts.hidden, experts.width
    return bytes_per_number(dtype) * (most.arrive * H + most.experts * (3 * H + 5 * F))


_PRODUCTS = {Level.MEDIUM: (4, 4), Level.FULL: (4, 4), Level.LAYER: (4, 4)}
"""(per routed row, per shared expert) recomputed FLOPs, per column of a token and column of an expert.

That is the first product; no gradient needs the result of the second one."""

_FORWARD = 6
"""FLOPs of a forward, in the same unit."""


def saving(experts: ExpertSizes, dtype: str, level: Level, arrive: float | None = None, filled: float = 1.0) -> Saving:
    """The bytes that a level saves per token and MoE layer, and its FLOPs.

    arrive: rows that a rank gets per token of its own (`schedc.step.costs.exchange.arrivals`); by default ``top``.
    """
    rows = RowsPerToken(experts.top * filled, (experts.top if arrive is None else arrive) * filled)
    saved = layer_bytes(experts, dtype, filled) - held_bytes(experts, dtype, level, rows=rows)
    routed = level >= Level.LIGHT
    per_row, per_shared = _PRODUCTS.get(level, (0, 0))
    products = per_row * experts.top * filled + per_shared * experts.shared
    flops = product_flops(moe_parts(experts)[PartName.ROUTER]) * routed + products * experts.hidden * experts.width
    flops += attention_flops(experts.block, experts.hidden) * (level >= Level.LAYER)
    return Saving(saved, round(flops))


def forward_flops(experts: ExpertSizes, filled: float = 1.0) -> float:
    """FLOPs per token of a MoE layer's forward: attention, router, and three products of each expert."""
    router = product_flops(moe_parts(experts)[PartName.ROUTER])
    products = _FORWARD * (experts.top * filled + experts.shared) * experts.hidden * experts.width
    return attention_flops(experts.block, experts.hidden) + router + products


def level_share(
    experts: ExpertSizes | None, dtype: str, level: Level, arrive: float | None = None, filled: float = 1.0
) -> float:
    """Share of a MoE layer's activations that a level holds; 1 where the sizes of experts are not known."""
    if experts is None or not experts.hidden or not experts.width:
        return 1.0
    return 1 - saving(experts, dtype, level, arrive, filled).bytes / layer_bytes(experts, dtype, filled)


def recomputed_share(role: str, level: Level) -> float:
    """Share of a node's forward that a level recomputes, counted in products; 1 for nodes without products."""
    routed, shared = _PRODUCTS.get(level, (0, 0))
    return {"experts": routed / _FORWARD, "shared": shared / _FORWARD}.get(role, 1.0)


def slot_bytes(experts: ExpertSizes, dtype: str) -> int:
    """Bytes of a hot expert's three matrices in its slot. The gradients of one microbatch take as many."""
    return expert_parameters(experts) * bytes_per_number(dtype)


def slot_gradient_bytes(experts: ExpertSizes) -> int:
    """Bytes of the gradients of a hot expert's three matrices, summed over a step in float32."""
    return expert_parameters(experts) * bytes_per_number("fp32")
