"""Process groups of a mesh: made by all processes in one order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def join_groups(parts: Sequence[Sequence[int]], timeout: float) -> dist.ProcessGroup | None:
    """A group for each of ``parts``, disjoint ranks of the world; the one that this process is in, or None.

    A collective over all processes, which give the same parts: torch numbers groups in the order in which they are
    made. (Left to their members alone, it names them by how many are alive, which other groups that come and go
    would make differ.) Nobody makes a group of one.
    """
    me = dist.get_rank()
    mine: dist.ProcessGroup | None = None
    for ranks in parts:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
            mine = made if me in ranks else mine
    return mine
