"""Makes the process groups of a mesh, by all processes in one order, and leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from schedc_runtime.device.choice import gpu
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
            group = new_group(ranks, timeout, high)
            mine = group if me in ranks else mine
    return mine


def new_group(ranks: Sequence[int], timeout: float, high: bool = False) -> dist.ProcessGroup:
    """A group of these processes of the world, with the backend of the world. A collective over all processes.

    timeout: seconds that a wait in the group may take. high: its collectives run on a stream of high priority.
    """
    backend = dist.get_backend()
    limit = timedelta(seconds=gpu.group_limit(backend, timeout))
    options = stream_options(backend, high)
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=limit, pg_options=options)
    return group


def leave_groups(groups: Sequence[dist.ProcessGroup], *, abort: bool, given: dist.ProcessGroup | None = None) -> None:
    """Leave process groups. abort: give up first what is in flight in any of them, which else is waited for.

    given: a group of the caller. Its works are given up where they stay on the device, and the group is not destroyed.
    """
    if abort:
        gpu.abort_groups([*groups, *([given] if given is not None and gpu.carries(given) else [])])
    for group in groups:
        dist.destroy_process_group(group)
