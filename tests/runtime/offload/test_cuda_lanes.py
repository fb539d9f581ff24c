"""Offloads on streams of a GPU: the same bits, memory that is free, and a host that waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc_runtime.offload.lanes import StreamLanes, lanes_for
from schedc_runtime.offload.rules import OffloadSettings
from schedc_runtime.partition.boundary import Boundary, TensorSpec
from schedc_runtime.stage.stage import Stage

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, WIDTH, MICROBATCHES = 1024, 1024, 3


def steps(moves: bool) -> tuple[list[Tensor], list[int]]:
    """Outputs and gradients of two steps; bytes that were allocated before each JOIN and behind it, in turn."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    stage, spec = Stage(nn.Sequential(*layers).to(device), 0, 2), TensorSpec((ROWS, WIDTH), torch.float32, True)
    edges = (pytree.tree_structure((0,)), ("x",)), (pytree.tree_structure(0), ("y",))
    stage.bind(*[Boundary((spec,), *edge) for edge in edges])
    lanes = lanes_for(device)
    assert isinstance(lanes, StreamLanes)
    if moves:
        stage.set_offload(OffloadSettings(lanes))
    results, allocated = [], []
    for step in range(2):
        inputs = [torch.randn(ROWS, WIDTH, device=device) for _ in range(MICROBATCHES)]
        if step:  # pinned memory has been allocated by now
            torch.cuda.set_sync_debug_mode("error")
        for m in range(MICROBATCHES):
            results += stage.forward(m, (inputs[m].clone(),))
            if moves:
                stage.start_offload(m)
                allocated.append(torch.cuda.memory_allocated())
                stage.join_offload(m)
                allocated.append(torch.cuda.memory_allocated())
        for m in range(MICROBATCHES):
            if moves:
                stage.start_fetch(m)
                stage.join_fetch(m)
            results += stage.backward(m, (torch.ones(ROWS, WIDTH, device=device),))
        torch.cuda.set_sync_debug_mode("default")
        stage.check_empty()
    results += [parameter.grad for parameter in stage.module.parameters() if parameter.grad is not None]
    assert lanes.buffers.used == 0
    lanes.close()
    return results, allocated


def test_bits_are_those_without_and_the_host_waits_for_nothing() -> None:
    expected, _ = steps(moves=False)
    results, allocated = steps(moves=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    freed = [before - after for before, after in zip(allocated[::2], allocated[1::2], strict=True)]
    assert min(freed) >= 4 * ROWS * WIDTH * 4  # the input, both products and the first GELU's output
