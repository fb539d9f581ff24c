"""Makes the process groups of a mesh, by all processes in one order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from schedc_runtime.transport.priorities import stream_options


def join_groups(parts: Sequence[Sequence[int]], timeout: float, high: bool = False) -> dist.ProcessGroup | None:
    """Make a group for each of ``parts``, disjoint ranks of the world. Returns this process's group, or None.

    timeout: seconds that a wait in the group may take. high: its collectives run on a stream of high priority.

    A collective over all processes, with the same parts: torch numbers groups in the order in which they are made.
    (Made by its members alone, a group is named by the number of groups alive, which differs between ranks.) A part of
    one rank gets no group.
    """
    me = dist.get_rank()
    mine: dist.ProcessGroup | None = None
    for ranks in parts:
        if len(ranks) > 1:
            options = stream_options(dist.get_backend(), high)
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), pg_options=options)
            mine = group if me in ranks else mine
    return mine
