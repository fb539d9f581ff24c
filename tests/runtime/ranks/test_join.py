"""The device that `join` gives torch for a process: a GPU of its own, or nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedc_runtime.ranks.join import join


@pytest.mark.parametrize(
    ("gpus", "backend", "device", "chosen"),
    [
        (2, None, torch.device("cuda", 1), "nccl"),
        (2, "cpu:gloo,cuda:nccl", torch.device("cuda", 1), "cpu:gloo,cuda:nccl"),
        (2, "gloo", None, "gloo"),
        (1, None, None, "gloo"),  # two processes of the machine, and one GPU
        (0, None, None, "gloo"),
    ],
)
def test_the_group_of_a_gpu_is_bound_to_it(
    gpus: int, backend: str | None, device: torch.device | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's communicators are then made at once, by all ranks, and not at the first call, by some of them."""
    told: list[Any] = []
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    module, store = import_module("schedc_runtime.ranks.join"), dist.HashStore()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(device))
    monkeypatch.setattr(module, "rendezvous", lambda url, timeout: iter([(store, 3, 4)]))
    monkeypatch.setattr(module, "meet_ranks", lambda store, *_: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **facts: told.append((backend, facts)))
    assert join(backend) == (device or torch.device("cpu"))
    *before, (name, facts) = told
    assert before == [device] * (device is not None)
    assert (name, facts["device_id"], facts["rank"], facts["world_size"]) == (chosen, device, 3, 4)
