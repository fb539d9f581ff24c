"""What the transport's tests run on every rank of a pool."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from schedc_runtime.transport.base import Transfer, TransportError
from schedc_runtime.transport.collectives import TorchCommunicator
from schedc_runtime.transport.distributed import TorchTransport
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu.device_splits import moved, provider_of_splits


def exchange(rank: int, world_size: int) -> bool:
    """Batches that cross, in an order that deadlocks unless receives are started first; odd tensors; FIFO."""
    group = dist.new_group([0, 1], backend="gloo")
    transport = TorchTransport(group, timeout=20)
    peer = 1 - rank
    rounds = []
    for number in range(20):
        turned = torch.arange(6.0).view(2, 3).t() + 100 * rank + number
        parts = (turned, torch.tensor(rank + number), torch.zeros(0), torch.tensor([True, False]))
        buffers = (
            torch.empty(3, 2),
            torch.empty((), dtype=torch.int64),
            torch.empty(0),
            torch.empty(2, dtype=torch.bool),
        )
        send, receive = Transfer(peer, False, parts), Transfer(peer, True, buffers)
        handles = transport.post([send, receive] if rank else [receive, send])
        rounds.append((number, handles, buffers))
    right = True
    for number, handles, buffers in rounds:
        for handle in handles:
            transport.wait(handle)
        expected = torch.arange(6.0).view(2, 3).t() + 100 * peer + number
        right &= torch.equal(buffers[0], expected)
        right &= buffers[1].item() == peer + number
        right &= buffers[3].tolist() == [True, False]
    right &= splits_on_the_device(group)
    transport.close()
    dist.destroy_process_group(group)
    return right


def splits_on_the_device(group: dist.ProcessGroup) -> bool:
    """Two ranks exchange rows whose splits are tensors, by the fallback."""
    communicator = TorchCommunicator(group, 20.0)
    sizes = torch.tensor([[1, 3], [0, 2]])
    rows = torch.arange(8.0).view(4, 2) + 100 * communicator.rank
    splits = sizes[communicator.rank], sizes[:, communicator.rank]
    provider = provider_of_splits(communicator, rows.device, "symmetric", or_fallback=True)
    result = moved(provider, communicator, rows, splits, 6).arrived()
    expected = [[0.0, 1.0]] if communicator.rank == 0 else [[2, 3], [4, 5], [6, 7], [100, 101], [102, 103]]
    return provider.asks == 1 and result.tolist() == expected + [[0.0, 0.0]] * (6 - len(expected))


def timeout(rank: int, world_size: int, seconds: float) -> list[str]:
    """Rank 0 waits for a message that rank 1 never sends."""
    group = dist.new_group([0, 1], backend="gloo")
    transport = TorchTransport(group, timeout=seconds)
    if rank == 1:
        time.sleep(3 * seconds)
        return []
    (handle,) = transport.post([Transfer(1, True, (torch.empty(1),))])
    try:
        transport.wait(handle)
    except TransportError as error:
        return [type(error).__name__, str(error)]
    return []
