"""What a rank holds inside its cells beyond the curve of its activations: what runs, and recomputed activations.

    forward     what the layer that runs takes
    I or B      the same, and what the backward of its stage has recomputed

A stage with experts recomputes all of its nodes first, and holds what its products take until their weight gradients:
it is whole, and gradients wait. A dense stage recomputes layer by layer in a B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Plan
from schedc.ir.recomputed import recomputed_ops
from schedc.plan.counts.head import logit_bytes
from schedc.plan.counts.layers import counted_layer
from schedc.plan.held_memory import HeldMemory
from schedc.plan.layout.parts import WITH_EXPERTS, ModelPart, PartKind, layers_in
from schedc.step.dependencies import Dependencies


def working_of_ops(held: HeldMemory, dependencies: Dependencies) -> Floats | None:
    """[ops] bytes inside the cell of each op, beyond the activations before and behind it; None: sizes are not known.

    held: what ranks hold without works, in bytes.
    """
    plan, layout, costs = held.plan, held.layout, held.of_stage
    stages = [layers_in(parts) for parts in layout.stages]
    kinds = {part.kind in WITH_EXPERTS for own in stages for part in own}
    if not plan.tokens or any(counted_layer(plan, experts) is None for experts in kinds):
        return None
    running = plan.tokens * np.array([_running(plan, parts) for parts in layout.stages])
    whole = held.layers.per_stage(layout, "activations")
    schedule, pending = dependencies.schedule, costs.pending_weight
    sizes = zip(whole.tolist(), pending.tolist(), costs.activation.tolist(), strict=True)
    inside = np.array([_inside(plan, stage, stages[stage], *each) for stage, each in enumerate(sizes)])
    before = np.stack([costs.activation, costs.restored])
    table = np.zeros((2, len(OpKind), schedule.stages))
    adaptive = np.array([plan.recompute_of(stage).adaptive is not None for stage in range(schedule.stages)])
    running, inside = np.where(adaptive, 0.0, running), np.where(adaptive, 0.0, inside)  # the worst counts already
    table[:, [OpKind.F, OpKind.R]] = running
    table[:, OpKind.I] = running + np.maximum(inside - np.maximum(before, pending), 0.0)
    table[:, OpKind.B] = running + np.maximum(inside - before, 0.0)
    own = table[recomputed_ops(schedule).astype(np.int8), schedule.kind, schedule.stage]
    of_cell = own[dependencies.first] + np.where(dependencies.second >= 0, own[dependencies.second], 0.0)
    return np.asarray(of_cell[dependencies.cell_of])


def _running(plan: Plan, parts: Sequence[ModelPart]) -> float:
    """Bytes per token of the part of a stage that takes most while it runs."""
    layers = (counted_layer(plan, experts) for experts in {part.kind in WITH_EXPERTS for part in layers_in(parts)})
    most = max((layer.working for layer in layers if layer is not None), default=0.0)
    return max(most, logit_bytes(plan)) if any(part.kind is PartKind.HEAD for part in parts) else most


def _inside(plan: Plan, stage: int, layers: Sequence[ModelPart], whole: float, pending: float, held: float) -> float:
    """Bytes of a microbatch while its backward runs, apart from the layer that runs.

    whole, pending, held: what it holds with everything recomputed, between I and W, and before its backward.
    """
    levels = plan.recompute_of(stage).of_layers_up_to(len(layers))
    with_experts = [level for part, level in zip(layers, levels, strict=True) if part.kind in WITH_EXPERTS]
    layer = counted_layer(plan, bool(with_experts))
    if with_experts:
        sent_again = sum(level >= Level.LIGHT for level in with_experts)
        arrived = layer.of_rows(layer.rows.experts) if layer is not None else 0.0
        return max(whole, pending) + plan.tokens * sent_again * arrived
    saved = (layer.saving(level).bytes for level in levels if layer is not None)
    return held + plan.tokens * max(saved, default=0.0)
