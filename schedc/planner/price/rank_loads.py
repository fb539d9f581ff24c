"""What plans lay on their ranks that counts beside the pipeline: parameters, last backwards, the network's work."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.plan.layout.costs import over_parts
from schedc.planner.price.part_table import HAS_EXPERTS, OP, PartTable
from schedc.planner.price.states import RankLoads


def rank_loads(table: PartTable, rows: Int64, counts: Floats, parameters: Floats, stages: int) -> RankLoads:
    """The loads of plans on ranks with these parts.

    rows: [...] of the table. counts: [..., P, kinds] parts of each rank. parameters: [..., kinds, 2] those of
    `kind_parameters`. All broadcast. stages: of all ranks.
    """
    own, experts = ((counts * parameters[..., None, :, of]).sum(axis=-1).max(axis=-1) for of in (0, 1))
    backward = over_parts(counts, (table.input[rows] + table.weight[rows])[..., :OP])
    layers = (counts @ HAS_EXPERTS).max(axis=-1)
    messages = 2.0 * stages / counts.shape[-2] * table.p2p[rows] * (stages > 1)
    late = np.stack([2.0 * lane[rows] * layers for lane in (table.node, table.rail)])
    return RankLoads(np.asarray(own), np.asarray(experts), backward.min(axis=-1), late, 2.0 * late + messages)
