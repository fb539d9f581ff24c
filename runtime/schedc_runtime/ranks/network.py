"""Connects the ranks of the mesh that are in this process with the others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.join import meet_ranks
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups, in_process_peer_groups, no_peers, peer_groups
from schedc_runtime.transport.base import Transfer, Transport
from schedc_runtime.transport.distributed import TorchTransport
from schedc_runtime.transport.in_process import InProcessNetwork


class Network:
    """The ranks of the mesh that are in this process, their transports and their groups.

    local: coordinates of the ranks in this process: one, or all with ``in_process``. names: names of all processes in
        errors. process: number of this process. store: where processes exchange small values; None for one process.

    Without a ``group`` each pipeline gets a new one, so that its messages mix with no others. It is closed when the
    pipeline fails, which wakes the ranks that wait for this one. A group of the caller stays open.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        in_process: bool,
        timeout: float,
        device: torch.device,
    ) -> None:
        self.mesh, self.ranks = mesh, mesh.pipeline
        self.in_process = in_process or (mesh.size == 1 and group is None)
        self.store: Store | None = None
        self.transports: dict[Coordinate, Transport] = {}
        self.peer_groups: dict[Coordinate, PeerGroups] = {}
        self._own: dist.ProcessGroup | None = None
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
        place = Coordinate(dist.get_rank(group), 0) if mesh.replicas == 1 else mesh.coordinate(dist.get_rank())
        self.local, self.process = [place], mesh.process(place)
        # Groups of other ranks may have the same name.
        among = "everyone" if group is None else f"{group.group_name}/{dist.get_global_rank(group, 0)}"
        self.store = meet_ranks(dist.distributed_c10d._get_default_store(), among, self.process, self.names, timeout)
        if group is None:
            limit = timedelta(seconds=timeout)
            groups = [dist.new_group(ranks, backend=dist.get_backend(), timeout=limit) for ranks in mesh.pipelines()]
            group = self._own = groups[place.replica]
        self.transports[place] = TorchTransport(group, timeout, coalesce=backend == gpu.BACKEND)
        self.peer_groups[place] = peer_groups(mesh, place, timeout) if mesh.replicas > 1 else no_peers()

    def _check_size(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and self.mesh.replicas > 1:
            raise RuntimeFault(
                "a process group was given for a mesh with replicas, which makes its own groups",
                "leave `group` out; the mesh takes all processes of the default group",
            )
        if not dist.is_initialized():
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, but torch.distributed has not been initialised",
                "start the script with torchrun and call schedc_runtime.join(), or pass in_process=True",
            )
        size, mesh = dist.get_world_size(group), self.mesh
        if size != mesh.size and mesh.replicas == 1:
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, the process group has {size}",
                f"compile the schedule for P={size}, or start {self.ranks} processes",
            )
        if size != mesh.size:
            raise RuntimeFault(
                f"the mesh has {mesh.pipeline} pipeline ranks times {mesh.experts} expert ranks times {mesh.data}, the"
                f" process group has {size}",
                f"start {mesh.size} processes, or take the mesh from the environment: Mesh.of_environment",
            )

    def reconnect(self) -> None:
        """Make new channels in one process, without the messages of a failed step."""
        for each in self.peer_groups.values():
            each.close()
        networks = [InProcessNetwork(self.ranks) for _ in range(self.mesh.replicas)]
        self.transports = {place: networks[place.replica].transport(place.pipeline) for place in self.local}

    def abort(self) -> None:
        """Close the connections: ranks that wait for this one fail at once instead of after their timeout."""
        if self.in_process:
            self.reconnect()
        self.close()

    def close(self) -> None:
        """Leave the groups that were made for this pipeline."""
        if not self.in_process:
            for each in self.peer_groups.values():
                each.close()
        if self._own is not None:
            for transport in self.transports.values():
                transport.close()
            group, self._own = self._own, None
            dist.destroy_process_group(group)

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
            " pass in_process=True to run all ranks on one device",
        )
    return backend
