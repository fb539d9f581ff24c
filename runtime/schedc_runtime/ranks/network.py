"""Connects the ranks of the mesh that are in this process with the others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from schedc.ir.communicators import Ends, communicators_of, ranks_of_communicators
from schedc.ir.program import Program
from schedc.ir.rendezvous import runs_in_one_queue
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.join import meet_ranks
from schedc_runtime.ranks.mesh import (
    Coordinate,
    Mesh,
    PeerGroups,
    in_process_peer_groups,
    no_peers,
    peer_groups,
    surplus,
)
from schedc_runtime.transport.base import Transfer, Transport
from schedc_runtime.transport.distributed import Members, TorchTransport
from schedc_runtime.transport.in_process import InProcessNetwork
from schedc_runtime.transport.process_groups import leave_groups, new_group


class Network:
    """The ranks of the mesh in this process, with transports and groups.

    local: coordinates of the ranks in this process: one, or all with ``in_process``. names: names of all processes in
        errors. process: number of this process. store: where processes exchange small values; None for one process.

    Without a ``group`` each pipeline gets a new one, so that its messages mix with no others. A failure of the pipeline
    closes the new group, and so wakes waiting ranks. A group of the caller stays open, but what it has in flight on a
    GPU is given up.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        in_process: bool,
        timeout: float,
        device: torch.device,
    ) -> None:
        self.mesh, self.ranks, self.device = mesh, mesh.pipeline, device
        self.in_process = in_process or (mesh.size == 1 and group is None)
        self.store: Store | None = None
        self.transports: dict[Coordinate, Transport] = {}
        self.peer_groups: dict[Coordinate, PeerGroups] = {}
        self._own: dist.ProcessGroup | None = None
        self._given = group
        if self.in_process:
            places = product(range(mesh.replicas), range(mesh.pipeline))
            self.local = [Coordinate(rank, replica) for replica, rank in places]
            self.names, self.process = ["this process"], 0
            self.peer_groups = in_process_peer_groups(mesh)
            self.reconnect()
            return
        self._check_size(group)
        backend = _backend_for(device, group)
        self.names = mesh.names
        place = Coordinate(dist.get_rank(group), 0) if mesh.peers == 1 else mesh.coordinate(dist.get_rank())
        self.local, self.process = [place], mesh.process(place)
        # Groups of other ranks may have the same name.
        among = "everyone" if group is None else f"{group.group_name}/{dist.get_global_rank(group, 0)}"
        self.store = meet_ranks(dist.distributed_c10d._get_default_store(), among, self.process, self.names, timeout)
        if group is None:
            groups = [new_group(ranks, timeout) for ranks in mesh.pipelines()]
            group = self._own = groups[place.replica * mesh.tensor + place.tensor]
        self.transports[place] = TorchTransport(group, timeout, coalesce=backend == gpu.BACKEND)
        self.peer_groups[place] = peer_groups(mesh, place, timeout) if mesh.peers > 1 else no_peers()

    def _check_size(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and self.mesh.peers > 1:
            raise RuntimeFault(
                "a process group was given for a mesh with replicas or tensor ranks, which makes its own groups",
                "leave `group` out; the mesh takes all processes of the default group",
            )
        if not dist.is_initialized():
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, but torch.distributed has not been initialised",
                "start the script with torchrun and call schedc_runtime.join(), or pass in_process=True",
            )
        size, mesh = dist.get_world_size(group), self.mesh
        if size != mesh.size and mesh.peers == 1:
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, the process group has {size}",
                f"compile the schedule for P={size}, or start {self.ranks} processes{surplus(size - self.ranks)}",
            )
        if size != mesh.size:
            split = f": {mesh.size} processes with {mesh.tensor} tensor ranks" if mesh.tensor > 1 else ""
            raise RuntimeFault(
                f"the mesh has {mesh.pipeline} pipeline ranks times {mesh.experts} expert ranks times"
                f" {mesh.data}{split}, the process group has {size}",
                f"start {mesh.size} processes, or take the mesh from the environment: Mesh.of_environment"
                + surplus(size - mesh.size),
            )

    def join_communicators(self, program: Program, timeout: float) -> None:
        """Make the groups of a program's communicators, all processes in one order, and use each connection once.

        A collective over all processes of the mesh. The first communicator that all ranks share is the pipeline's own
        group. A group of the caller carries all messages, with a warning. Raises `RuntimeFault` where a single queue
        would mix the messages or deadlock. timeout: seconds that a wait in a group may take.
        """
        if self.in_process:
            return
        (transport,) = self.transports.values()
        assert isinstance(transport, TorchTransport)
        if program.communicators.size and self._own is None:
            if not runs_in_one_queue(program):
                raise RuntimeFault(
                    "the messages of this program need its communicators, and share the process group that was given",
                    "leave `group` out, and the pipeline makes a group for each communicator",
                )
            warnings.warn(
                f"{program.name} has {program.communicators.max() + 1} communicators, and its messages share the group"
                " given: they may wait for each other. Leave `group` out, and the pipeline makes its groups.",
                stacklevel=5,
            )
        elif program.communicators.size:
            transport.communicators = self._join(ranks_of_communicators(program), timeout)
        self._use_connections(program, transport)

    def _join(self, parts: Sequence[Sequence[int]], timeout: float) -> dict[int, Members]:
        """The groups of communicators of this process, by number. parts: the pipeline ranks of each."""
        joined = dict[int, Members]()
        shared = [number for number, ranks in enumerate(parts) if len(ranks) == self.ranks][:1]
        for number, ranks in enumerate(parts):
            for pipeline in self.mesh.pipelines() if ranks and number not in shared else ():
                processes = [pipeline[rank] for rank in ranks]
                group = new_group(processes, timeout)
                if self.process in processes:
                    joined[number] = Members(group, {rank: place for place, rank in enumerate(ranks)})
        return joined

    def _use_connections(self, program: Program, transport: TorchTransport) -> None:
        """Send an element over each connection of each communicator, in one order on all ranks.

        NCCL connects two ranks at their first message, which would otherwise fall into the first step.
        """
        ends, numbers = Ends.of(program), communicators_of(program)
        for number, source, destination in np.unique([numbers, ends.source, ends.destination], axis=1).T.tolist():
            if transport.rank in (source, destination):
                peer, receive = (source, True) if transport.rank == destination else (destination, False)
                element = torch.zeros(1, device=self.device)
                (handle,) = transport.post([Transfer(peer, receive, (element,), number)])
                transport.wait(handle)

    def limit_waits(self, seconds: float) -> None:
        """Limit each further wait for a message or collective to so many seconds."""
        for transport in self.transports.values():
            if isinstance(transport, TorchTransport):
                transport.limit_waits(seconds)
        for groups in self.peer_groups.values():
            groups.limit_waits(seconds)

    def reconnect(self) -> None:
        """Make new channels in one process, without the messages of a failed step."""
        for each in self.peer_groups.values():
            each.close()
        networks = [InProcessNetwork(self.ranks) for _ in range(self.mesh.replicas)]
        self.transports = {place: networks[place.replica].transport(place.pipeline) for place in self.local}

    def abort(self, others: Sequence[dist.ProcessGroup] = ()) -> None:
        """Close the connections: waiting ranks fail at once, not after a timeout.

        Every group is aborted before one is destroyed. others: further groups of this pipeline.
        """
        if self.in_process:
            self.reconnect()
        leave_groups([*self._take_groups(), *others], abort=True, given=self._given)

    def close(self) -> None:
        """Leave the groups that were made for this pipeline."""
        leave_groups(self._take_groups(), abort=False)

    def _take_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that were made for this pipeline. Nothing more is sent through them."""
        if self.in_process:
            return []
        groups = [group for each in self.peer_groups.values() for group in each.take_groups()]
        if self._own is not None:
            (transport,) = self.transports.values()
            assert isinstance(transport, TorchTransport)
            groups += [members.group for members in transport.communicators.values()]
            groups.append(self._own)
            transport.close()
            self._own = None
        return groups

    def gather_tensors(
        self,
        wanted: Mapping[str, tuple[int, torch.Size, torch.dtype]],
        mine: Mapping[str, Tensor],
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Gather tensors on the CPU of rank 0 of each pipeline; {} on other ranks.

        wanted: name -> (owning rank, shape, dtype). mine: the tensors of this rank by name.
        """
        place = self.local[0]
        rank, transport = place.pipeline, self.transports[place]
        gathered: dict[str, Tensor] = {}
        for name, (owner, shape, dtype) in wanted.items():
            if owner == rank:
                value = mine[name].detach()
                if rank == 0:
                    gathered[name] = value.cpu().clone()
                    continue
            elif rank == 0:
                value = torch.empty(shape, dtype=dtype, device=device)
            else:
                continue
            peer = owner if rank == 0 else 0
            (handle,) = transport.post([Transfer(peer, rank == 0, (value.reshape(-1),))])
            transport.wait(handle)
            if rank == 0:
                gathered[name] = value.cpu()
        return gathered


def _backend_for(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """The backend of ``group`` that carries tensors of ``device``; raises `RuntimeFault` if none can."""
    config = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    backend = dict(entry.split(":") for entry in config.split(",")).get(device.type, "")
    # gloo registers for every device, but sends and receives in the memory of the host.
    if not backend or (backend == "gloo" and device.type != "cpu"):
        raise RuntimeFault(
            f"the model lies on {device}, and the process group ({config}) cannot send tensors from there",
            "initialise torch.distributed with a backend for that device (nccl for CUDA), move the model to the CPU, or"
            " pass in_process=True to run on one device",
        )
    return backend
