"""What plans lay on their ranks that counts beside the pipeline: parameters, last backwards, the network's work."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.price.part_table import HAS_EXPERTS, OP, PartTable
from schedc.planner.price.states import RankLoads, kind_parameters


def rank_loads(table: PartTable, rows: Int64, counts: Floats, stages: int) -> RankLoads:
    """The loads of plans on ranks with these parts.

    rows: [plans] of the table. counts: [plans, P, kinds] or [P, kinds] parts of each rank. stages: of all ranks.
    Returns numbers where the plans share their counts for what follows from those alone, else [plans].
    """
    own, experts = kind_parameters(table.problem.model, stages == 1).T
    backward = (table.input[rows] + table.weight[rows])[:, :OP]
    layers = (counts @ HAS_EXPERTS).max(axis=-1)
    messages = 2.0 * stages / counts.shape[-2] * table.p2p[rows] * (stages > 1)
    late = np.stack([2.0 * lane[rows] * layers for lane in (table.node, table.rail)])
    return RankLoads(
        np.asarray((counts @ own).max(axis=-1)),
        np.asarray((counts @ experts).max(axis=-1)),
        np.asarray((counts @ backward[..., None])[..., 0].min(axis=-1)),
        late,
        2.0 * late + messages,
    )
