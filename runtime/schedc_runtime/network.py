"""Which ranks of a pipeline run in this process, and what connects them to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.transport import InProcessNetwork, TorchTransport, Transfer, Transport

_uses: Counter[str] = Counter()
"""How many pipelines this process has built on each process group; equal on all members of the group."""


class Network:
    """The ranks of this process and their transports.

    local: ranks that run here: one of them, or with ``in_process`` all. processes: how many take part.
    store: where the processes exchange small values; None within one process.

    Without a ``group`` a new one is made over all processes, so that the pipeline's messages mix with no others; it is
    given up when the pipeline fails, which wakes the ranks that wait for this one. A given group stays the caller's.
    """

    def __init__(
        self, program: Program, group: dist.ProcessGroup | None, in_process: bool, timeout: float, device: torch.device
    ) -> None:
        self.ranks = program.ranks
        self.in_process = in_process or (self.ranks == 1 and group is None)
        self.store: Store | None = None
        self.transports: dict[int, Transport] = {}
        self._own: dist.ProcessGroup | None = None
        if self.in_process:
            self.local, self.processes = list(range(self.ranks)), 1
            self.reconnect()
            return
        self._check_size(group)
        backend = _backend_for(device, group)
        self.processes = self.ranks
        if group is None:
            limit = timedelta(seconds=timeout)
            group = self._own = dist.new_group(list(range(self.ranks)), backend=dist.get_backend(), timeout=limit)
        self.local = [dist.get_rank(group)]
        self.transports[self.local[0]] = TorchTransport(group, timeout, coalesce=backend == "nccl")
        name = group.group_name
        _uses[name] += 1
        self.store = PrefixStore(f"schedc/{name}/{_uses[name]}", dist.distributed_c10d._get_default_store())

    def _check_size(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, but torch.distributed has not been initialised",
                "start the script with torchrun and call torch.distributed.init_process_group, or pass in_process=True",
            )
        if (size := dist.get_world_size(group)) != self.ranks:
            raise RuntimeFault(
                f"the program is for {self.ranks} ranks, the process group has {size}",
                f"compile the schedule for P={size}, or start {self.ranks} processes",
            )

    def reconnect(self) -> None:
        """In one process: new channels, without the messages of a step that failed."""
        network = InProcessNetwork(self.ranks)
        self.transports = {rank: network.transport(rank) for rank in self.local}

    def abort(self) -> None:
        """Give the connections up: ranks that wait for this one fail at once instead of after their timeout."""
        if self.in_process:
            self.reconnect()
        self.close()

    def close(self) -> None:
        """Leave the group made for this pipeline."""
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
        """``wanted`` (name -> owning rank, shape, dtype) on the CPU of rank 0, in its order; {} on the others."""
        rank = self.local[0]
        transport = self.transports[rank]
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
