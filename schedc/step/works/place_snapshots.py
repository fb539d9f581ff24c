"""Places snapshots: the state of every stage leaves for the host beside a whole step."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.works import WorkKind
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks


def place_snapshots(dependencies: Dependencies, bytes: Floats) -> PlacedWorks:
    """A snapshot of every stage on every rank that holds it: from its first instruction to the end of its stream.

    bytes: [stages] of the state; a stage without any has no snapshot.
    """
    placement = dependencies.schedule.placement
    rank, stage = np.unique(
        [
            (int(rank), stage)
            for stage in np.flatnonzero(bytes > 0).tolist()
            for rank in placement.rank_of_stage[:, stage]
        ]
        or np.zeros((0, 2), np.int64),
        axis=0,
    ).T
    kind = np.full(rank.size, WorkKind.SNAPSHOT, np.int8)
    start, join = dependencies.rank_start[rank] + rank, dependencies.rank_start[rank + 1] + rank
    return PlacedWorks.of(kind, stage.astype(np.int32), np.full(rank.size, -1, np.int32), bytes[stage], start, join)
