"""When ranks started their exchanges and messages, in emulated device time: tables that a machine's ranks share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from schedc.cell.graph import CONTEXT_EXCHANGES, TENSOR_EXCHANGES, Lane, StageShape
from schedc.cell.issue_order import ExpertRanks, scope
from schedc.ir.arrays import Floats
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Mesh

SLOTS = 4096
"""Exchanges of a communicator, or messages to a rank, that a rank may start before others have read of the first."""
REPLICA_CHANNELS = ("replicas", "same experts")
"""The communicators of works among replicas, by `schedc.ir.works.WorkGroup`."""
CHANNELS = (*REPLICA_CHANNELS, "expert", "lane rail", "lane node", "tensor", "context")
"""The communicators of a rank, by what they connect. Each starts its exchanges in the same order on all its ranks."""
PATIENCE = 60.0
"""Seconds to wait for the other ranks' starts once an exchange or a message has really completed."""


class Ticket(NamedTuple):
    """An exchange that this rank has started: index in `CHANNELS`, position there, and the processes that take part."""

    channel: int
    number: int
    members: tuple[int, ...]


class AwaitedMessage(NamedTuple):
    """A message that this rank receives: the sender, and the number of the message between the two processes."""

    sender: int
    number: int


@dataclass
class SharedStarts:
    """The starts of all ranks of a mesh on one machine.

    exchanges: [processes, channels, slots, 3] number of the exchange plus 1, its start in seconds of the device's
        clock, and its time in seconds on that rank.
    messages: [processes, processes, slots, 2] by sender and receiver: number of the message plus 1, and its start in
        seconds of the sender's clock.
    """

    mesh: Mesh
    process: int
    exchanges: Floats
    messages: Floats
    counts: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    """Starts so far, by channel and by pair of processes."""

    @classmethod
    def of_processes(cls, mesh: Mesh, process: int) -> SharedStarts:
        """The tables of all processes of the default group, which are on this machine. A collective."""
        exchanges, messages = _shapes(mesh)
        return cls(mesh, process, _mapped(exchanges, process), _mapped(messages, process))

    @classmethod
    def in_memory(cls, mesh: Mesh) -> list[SharedStarts]:
        """[processes] the tables of ranks that share one process."""
        exchanges, messages = map(np.zeros, _shapes(mesh))
        return [cls(mesh, process, exchanges, messages) for process in range(mesh.size)]

    def post(self, shape: StageShape, node: int, start: float, time: float) -> Ticket | None:
        """Note that this rank started an exchange; None for a copy to its host, in which no other rank takes part.

        start: seconds of its clock, time: seconds.
        """
        if shape.nodes[node].lane is Lane.HOST:
            return None
        lane, reach, role = shape.nodes[node].lane, scope(shape, node), shape.nodes[node].role
        place = self.mesh.coordinate(self.process)
        if self.mesh.tensor > 1 and role in TENSOR_EXCHANGES:
            return self.post_among(tuple(self.mesh.splitting(place)), "tensor", start, time)
        if self.mesh.context > 1 and role in CONTEXT_EXCHANGES:
            return self.post_among(tuple(self.mesh.sharing_sequences(place)), "context", start, time)
        ranks = ExpertRanks(
            self.mesh.experts // (self.mesh.per_node or self.mesh.experts),
            self.mesh.per_node or self.mesh.experts,
            self.mesh.expert_groups,
        )
        peers = self.mesh.replicas_of(place)
        members = tuple(peers[peer] for peer in ranks.members(ranks.communicator(lane, reach, self.mesh.peer(place))))
        return self.post_among(members, reach if reach != "lane" else f"lane {lane}", start, time)

    def post_among(self, members: tuple[int, ...], channel: str, start: float, time: float) -> Ticket:
        """As `post`, for any collective of these processes. channel: one of `CHANNELS`."""
        index = CHANNELS.index(channel)
        number = self._next(index)
        _note(self.exchanges[self.process, index, number % SLOTS], number, start, time)
        return Ticket(index, number, members)

    def last(self, ticket: Ticket) -> tuple[float, float]:
        """(last start, longest time) of an exchange among its ranks, in seconds. Waits until all have started it."""
        rows = self._noted(self.exchanges, (list(ticket.members), ticket.channel), ticket.number, ticket.members)
        return float(rows[:, 1].max()), float(rows[:, 2].max())

    def send(self, peer: int, start: float) -> None:
        """Note that this rank sends a message to a pipeline rank; start: seconds of its clock."""
        receiver = self._process(peer)
        number = self._next((self.process, receiver))
        _note(self.messages[self.process, receiver, number % SLOTS], number, start)

    def expect(self, peer: int) -> AwaitedMessage:
        """Note that this rank receives a message of a pipeline rank. Both count them in the order of their posts."""
        sender = self._process(peer)
        return AwaitedMessage(sender, self._next((sender, self.process)))

    def sent(self, message: AwaitedMessage) -> float:
        """Seconds of the sender's clock: when it sent a message. Waits until it has."""
        pair = ([message.sender], self.process)
        return float(self._noted(self.messages, pair, message.number, (message.sender,))[0, 1])

    def _process(self, peer: int) -> int:
        return self.mesh.process(self.mesh.coordinate(self.process)._replace(pipeline=peer))

    def _next(self, counted: object) -> int:
        self.counts[counted] += 1
        return self.counts[counted] - 1

    def _noted(self, table: Floats, place: tuple[list[int], int], number: int, members: tuple[int, ...]) -> Floats:
        """[members, columns] the rows of ``members`` in a table, once all are written."""
        index = (*place, number % SLOTS)
        rows, began = table[index], perf_counter()
        while (rows[:, 0] != number + 1).any():
            if perf_counter() - began > PATIENCE:
                raise RuntimeFault(
                    f"an exchange or a message was not started by all of the processes {list(members)}",
                    "emulate device time on one machine, with every process of the mesh",
                )
            sleep(0)
            rows = table[index]
        return np.asarray(rows)


def _shapes(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (mesh.size, len(CHANNELS), SLOTS, 3), (mesh.size, mesh.size, SLOTS, 2)


def _mapped(shape: tuple[int, ...], process: int) -> Floats:
    """Zeros in memory that all processes share. A collective."""
    path = [mkstemp(prefix="starts")[1] if process == 0 else ""]
    if process == 0:
        np.memmap(path[0], np.float64, "w+", shape=shape).flush()
    dist.broadcast_object_list(path, src=0)
    table = np.memmap(path[0], np.float64, "r+", shape=shape)
    dist.barrier()
    if process == 0:
        Path(path[0]).unlink()  # the ranks keep it open
    return table


def _note(slot: Floats, number: int, *columns: float) -> None:
    slot[1:] = columns
    slot[0] = number + 1  # last: a reader of the number finds the columns of the same start
