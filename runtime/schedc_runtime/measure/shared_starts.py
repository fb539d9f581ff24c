"""When each rank of a machine started its exchanges in emulated device time: a table in memory that the ranks share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from schedc.cell.graph import Lane, StageShape
from schedc.cell.issue_order import ExpertRanks, scope
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Coordinate, Mesh

SLOTS = 4096
"""Exchanges of a communicator that a rank may start before the others have read of the first."""
CHANNELS = ("replicas", "expert", "lane rail", "lane node")
"""The communicators of a rank, by what they connect. Each starts its exchanges in the same order on all its ranks."""
PATIENCE = 60.0
"""Seconds to wait for the other ranks' starts once an exchange has really completed."""


class Ticket(NamedTuple):
    """An exchange that this rank has started: index in `CHANNELS`, position there, and the processes that take part."""

    channel: int
    number: int
    members: tuple[int, ...]


@dataclass
class SharedStarts:
    """The starts of all ranks of a mesh on one machine.

    table: [processes, channels, slots, 3] number of the exchange plus 1, its start in seconds of `perf_counter`, which
        the processes of a machine share, and its time in seconds on that rank.
    """

    mesh: Mesh
    process: int
    table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of_processes(cls, mesh: Mesh, process: int) -> SharedStarts:
        """The table of all processes of the default group, which are on this machine. A collective."""
        path = [mkstemp(prefix="starts")[1] if process == 0 else ""]
        shape = (mesh.size, len(CHANNELS), SLOTS, 3)
        if process == 0:
            np.memmap(path[0], np.float64, "w+", shape=shape).flush()
        dist.broadcast_object_list(path, src=0)
        table = np.memmap(path[0], np.float64, "r+", shape=shape)
        dist.barrier()
        if process == 0:
            Path(path[0]).unlink()  # the ranks keep it open
        return cls(mesh, process, table)

    def post(self, shape: StageShape, node: int, start: float, time: float) -> Ticket | None:
        """Note that this rank started an exchange; None for a copy to its host, in which no other rank takes part.

        start: seconds of `perf_counter`, time: seconds.
        """
        if shape.nodes[node].lane is Lane.HOST:
            return None
        lane, reach = shape.nodes[node].lane, scope(shape, node)
        channel = CHANNELS.index(reach if reach != "lane" else f"lane {lane}")
        place, number = self.mesh.coordinate(self.process), self.counts[channel]
        ranks = ExpertRanks(
            self.mesh.experts // (self.mesh.per_node or self.mesh.experts),
            self.mesh.per_node or self.mesh.experts,
            self.mesh.data,
        )
        replicas = ranks.members(ranks.communicator(lane, reach, place.replica))
        members = tuple(self.mesh.process(Coordinate(place.pipeline, replica)) for replica in replicas)
        self.counts[channel] += 1
        slot = self.table[self.process, channel, number % SLOTS]
        slot[1:] = start, time
        slot[0] = number + 1
        return Ticket(channel, number, members)

    def last(self, ticket: Ticket) -> tuple[float, float]:
        """(last start, longest time) of an exchange among its ranks, in seconds. Waits until all have started it."""
        rows = self.table[list(ticket.members), ticket.channel, ticket.number % SLOTS]
        began = perf_counter()
        while (rows[:, 0] != ticket.number + 1).any():
            if perf_counter() - began > PATIENCE:
                raise RuntimeFault(
                    f"an exchange was not started by all of the processes {list(ticket.members)}",
                    "emulate device time on one machine, with every process of the mesh",
                )
            sleep(0)
            rows = self.table[list(ticket.members), ticket.channel, ticket.number % SLOTS]
        return float(rows[:, 1].max()), float(rows[:, 2].max())
