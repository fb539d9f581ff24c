"""What tensor and context ranks of a plan exchange and hold: bytes of a microbatch, from the sizes of its lines."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.parallel import Parallel
from schedc.ir.plan import Level, Plan, Recompute, bytes_per_number
from schedc.plan.counts.layers import counted_layer, layer_of_kind
from schedc.plan.layout.parts import Layout, layers_in


def exchanged_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of a microbatch on a rank, by role of an exchange; those of unknown sizes are left out.

    gather: rows that a rank gets for a core. scatter: rows of sums that other ranks get of it. keys: keys and values
    that it gets for an attention. message: rows to the next stage. Empty without tensor and context ranks.
    """
    parallel = plan.parallel
    if parallel is None or parallel.tp * parallel.cp == 1 or not plan.tokens or not plan.hidden:
        return {}
    own = plan.tokens * plan.hidden * bytes_per_number(plan.dtype)
    found = {"message": own}
    if parallel.tp > 1:
        found |= dict.fromkeys(("gather", "scatter"), (parallel.tp - 1) * own)
    layer = counted_layer(plan, plan.experts is not None)
    if parallel.cp > 1 and layer is not None and plan.block is not None and plan.block.heads:
        found["keys"] = (parallel.cp - 1) * plan.tokens * layer.key_bytes
    return found


def kept_gathered(plan: Plan, layout: Layout) -> Floats | None:
    """[2, stages] bytes that a microbatch holds more because ranks keep what they gather; None for unknown sizes.

    The first row counts from the forward on, the second behind a recomputation: between I and W.
    """
    split = plan.parallel or Parallel()
    more = np.zeros((2, len(layout.stages)))
    for stage, parts in enumerate(layout.stages):
        layers = layers_in(parts)
        recompute = plan.recompute_of(stage)
        levels = (recompute if recompute.adaptive is None else Recompute()).of_layers_up_to(len(layers))
        for part, level in zip(layers, levels, strict=True):
            if (layer := layer_of_kind(plan, part.kind)) is None or not plan.tokens:
                return None
            for row, held in enumerate((level, Level.NONE)):
                more[row, stage] += plan.tokens * layer.gathered(split.tp, split.cp, held)
    return more
