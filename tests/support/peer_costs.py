"""Measures the processor time of keepers that copy states to each other, in plain copies of the same bytes.

Two nodes with a rank each are those of `support.lost_nodes`, with larger states. A keeper sends a state of its node and
takes one of its neighbour: both are in the figure.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

from schedc_runtime.keeper.places import SHARED_MEMORY, Places
from support import lost_nodes
from support.lost_nodes import Cluster

_WARM = 3
"""States behind which both images of each rank have their memory everywhere."""
_COPIES = 15
_SECONDS = 60.0
_RANKS = 2


def keeper_cpu_per_copy(states: int = 8, size: int = 32 << 20) -> float:
    """Processor time of keepers for a state that is sent and taken, over that of a copy of its bytes.

    states: number of states that all keepers send. size: bytes of a rank that are sent.
    """
    nodes = patch.multiple(lost_nodes, NODES=_RANKS, EACH=1, WORLD=_RANKS, _BLOCKS=size // 32)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place, nodes:
        cluster = Cluster(Path(place))
        try:
            cluster.start()
            _rounds(cluster, _WARM)
            before = _seconds(cluster)
            _rounds(cluster, _WARM + states)
            spent = _seconds(cluster) - before
        finally:
            cluster.close()
    return spent / (states * _RANKS * _copy(size))


def _rounds(cluster: Cluster, states: int) -> None:
    """Go on until all neighbours have got so many states."""
    until = time.monotonic() + _SECONDS
    while cluster.agreed < states:
        cluster.round(until)


def _seconds(cluster: Cluster) -> float:
    """Processor time of all keepers so far, of all their threads."""
    spent = 0
    for memory in cluster.memory:
        watch = Places(next(memory.glob("schedc-*"))).watch()
        assert watch is not None
        fields = Path(f"/proc/{watch.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / os.sysconf("SC_CLK_TCK")


def _copy(size: int) -> float:
    """Processor time of a copy of so many bytes to shared memory."""
    source, times = bytearray(os.urandom(1 << 10) * (size >> 10)), list[float]()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as target:
            target[:] = source  # takes the pages
            for _ in range(_COPIES):
                begin = time.process_time()
                target[:] = source
                times.append(time.process_time() - begin)
    return median(times)
