"""Section `symmetric`: exchanges whose splits stay on the device: the order of rows, and time over the fallback."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.claims import Bound, Claim
from gpu.device_splits import PROVIDERS, moved
from gpu.setting import NotMeasured, Setting, drawn, medians
from schedc_runtime.transport.collectives import TorchCommunicator
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators

CLAIMS = (
    Claim(
        "exchanges by splits on the device give the fallback's rows, and are no slower",
        "a group of one rank: the order among several members needs several GPUs",
        (Bound("symmetric.same_rows", "==", True), Bound("symmetric.speedup", ">=", 1.0)),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    fallback = in_process(setting)
    if not setting.gpu:
        reason = PROVIDERS["symmetric"].why_not(InProcessCommunicators(1).member(0), setting.device)
        raise NotMeasured(f"{reason}; the fallback's rows are {'' if fallback else 'not '}in order")
    # One process has one GPU: the order among several members needs several.
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        communicator = TorchCommunicator(dist.group.WORLD, 60.0)
        if reason := PROVIDERS["symmetric"].why_not(communicator, setting.device):
            raise NotMeasured(f"{reason}; the fallback's rows are {'' if fallback else 'not '}in order")
        return {"symmetric": {"fallback_in_order": fallback} | alone(setting, communicator)}
    finally:
        dist.destroy_process_group()


def alone(setting: Setting, communicator: TorchCommunicator) -> dict[str, Any]:
    """Both providers in a group of one rank: the same rows, and their times."""
    rows = drawn(setting, setting.tokens, setting.width)
    splits = torch.tensor([setting.tokens - 3], device=setting.device)
    room = setting.tokens + 5
    runs = {
        name: lambda provider=provider: moved(provider, communicator, rows, (splits, splits), room).arrived()
        for name, provider in PROVIDERS.items()
    }
    same = torch.equal(runs["symmetric"](), runs["asking"]())
    times = medians(setting, runs)
    return {"same_rows": same, "speedup": times["asking"] / times["symmetric"], "members": 1}


def in_process(setting: Setting, members: int = 4) -> bool:
    """Whether the fallback's rows come from member 0 first, in the order in which they were sent."""
    hub = InProcessCommunicators(members)
    sizes = torch.randint(0, 5, (members, members), generator=torch.Generator().manual_seed(0))
    on_device = sizes.to(setting.device)
    sent: list[Tensor] = [drawn(setting, int(sizes[rank].sum()), 8, seed=rank) for rank in range(members)]
    moving = [
        moved(PROVIDERS["asking"], hub.member(rank), sent[rank], (on_device[rank], on_device[:, rank]), 5 * members)
        for rank in range(members)
    ]
    for rank, each in enumerate(moving):
        parts = [rows.split(sizes[source].tolist())[rank] for source, rows in enumerate(sent)]
        expected = torch.cat(parts)
        result = each.arrived()
        if not torch.equal(result[: len(expected)], expected) or result[len(expected) :].any():
            return False
    return True
