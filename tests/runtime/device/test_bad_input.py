"""Targets on a device, a step in a stream of the user, and GPUs of other capabilities."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

from schedc_runtime.device.choice import device_for, gpu, stand_in
from schedc_runtime.device.order import StreamOrder
from schedc_runtime.device.simulated import SimulatedDevice
from schedc_runtime.pipeline.agree import counts
from schedc_runtime.pipeline.agree.counts import counted
from schedc_runtime.pipeline.build.loss_function import labels_counted
from schedc_runtime.testing import simulated_device
from support.simulated_cases import expert_steps, watched

CPU = torch.device("cpu")
STEP = partial(expert_steps, "1f1b", {"P": 1, "M": 1}, "  alltoall flat\n")


def test_targets_on_a_device_are_told_once() -> None:
    device, targets = SimulatedDevice(StreamOrder()), torch.tensor([1, -100, 3])
    device.where = torch.device("cuda")
    counts._say_that_counting_waits.cache_clear()
    with stand_in(device), pytest.warns(UserWarning, match="the targets lie on cuda: each step begins with a wait"):
        assert counted(labels_counted, targets) == 2
    with stand_in(device), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted(labels_counted, targets) == 2
    counts._say_that_counting_waits.cache_clear()
    assert counted(labels_counted, targets) == 2  # on the host nothing waits


def in_stream(waits: bool) -> dict[str, Tensor]:
    """A step inside a stream of the user's, who lets it wait for what came before, or does not."""
    device = device_for(CPU)
    stream, behind = device.stream("the user's"), device.record()
    numbers = torch.ones(4)
    if waits:
        behind = device.record()
        behind.wait(stream)
    with device.on(stream):
        numbers += 1
        values = STEP() if waits else {}
        done = device.record()
    done.wait(device.current())
    return values


@pytest.mark.slow
def test_a_step_inside_a_stream_of_the_user_keeps_its_bits() -> None:
    ordered = watched(partial(in_stream, True), lanes=["the user's", "expert"])
    assert ordered.findings == ()
    assert all(torch.equal(value, ordered.values[name]) for name, value in STEP().items())
    (finding,) = watched(partial(in_stream, False)).findings
    assert finding.startswith("the user's does not wait for compute, and both use one memory")


@pytest.mark.parametrize("device", [device_for(CPU), gpu.GpuDevice(torch.device("cuda", 0))])
def test_a_capability_that_no_device_knows_is_a_mistake_of_ours(device: SimulatedDevice) -> None:
    with pytest.raises(KeyError, match="warp"):
        device.supports("warp drive")


@pytest.mark.parametrize(
    ("capability", "triton", "grouped"),
    [((7, 5), "these kernels need a GPU of compute capability 8.0", "7.5"), ((12, 1), "", "12.1")],
)
def test_a_gpu_of_an_unknown_compute_capability_says_what_it_lacks(
    capability: tuple[int, int], triton: str, grouped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    device = gpu.GpuDevice(torch.device("cuda", 0))
    assert device.supports("triton").endswith(triton)
    assert bool(device.supports("triton")) is bool(triton)
    told = f"a GPU of compute capability {grouped}, and grouped products need 9 or 10"
    assert device.supports("grouped products") == told


def test_a_device_that_stands_in_ends_with_its_block() -> None:
    with simulated_device():
        assert isinstance(device_for(CPU), SimulatedDevice)
    assert not isinstance(device_for(CPU), SimulatedDevice)
