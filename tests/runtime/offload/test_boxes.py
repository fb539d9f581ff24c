"""Boxes of single stages: leaving boxes, staying boxes with reasons, and reads of boxes that are away."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from schedc.ir.plan import Level, Recompute
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import StageError
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.offload.account import Reason
from schedc_runtime.offload.host_buffers import HostBuffers, rounded, starts_in_buffer
from schedc_runtime.offload.lanes import StreamLanes, ThreadLanes
from schedc_runtime.offload.rules import OffloadSettings
from schedc_runtime.partition.boundary import Boundary, TensorSpec
from schedc_runtime.stage.stage import Stage
from support.offload_cases import weak_storage
from support.recompute_cases import TOKENS, WIDTH, moe_stage
from support.sweeps import swept


def stage_of(module: nn.Module, example: Tensor, **options: Any) -> Stage:
    """The first of two stages, as a whole, which moves everything."""
    stage, spec = Stage(module, 0, 2), TensorSpec(tuple(example.shape), example.dtype, True)
    edges = (pytree.tree_structure((0,)), ("x",)), (pytree.tree_structure(0), ("y",))
    stage.bind(*[Boundary((spec,), *edge) for edge in edges])
    stage.set_offload(OffloadSettings(StreamLanes(), **options))
    return stage


def round_trip(stage: Stage, microbatch: int) -> None:
    stage.start_offload(microbatch)
    stage.join_offload(microbatch)
    stage.start_fetch(microbatch)
    stage.join_fetch(microbatch)


@pytest.mark.slow
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("lanes", [StreamLanes, ThreadLanes])
@pytest.mark.sweep
@pytest.mark.parametrize("level", swept([Level.NONE, Level.ACT, Level.FULL, Level.LAYER], [Level.ACT]))
def test_a_stage_holds_nothing_but_what_stays(level: Level, lanes: Callable[[], Any]) -> None:
    inputs = torch.randn(3, TOKENS, WIDTH)
    results = []
    for moves in (False, True):
        stage = moe_stage(Recompute(level))
        of_stage = lanes()
        if moves:
            stage.set_offload(OffloadSettings(of_stage))
        outputs, recorders = [], []
        gc.disable()
        for m in range(3):
            (output,) = stage.forward(m, (inputs[m].clone(),))
            outputs.append(output)
            if stage._states[m].recorder is not None:
                recorders.append(weakref.ref(stage._states[m].recorder))
            before = held(stage, m).total
            if moves:
                moved = stage.start_offload(m)
                released = stage.join_offload(m)
                account = stage.offload.account
                kept = sum(account.kept.values())
                account.clear()
                assert moved == released > 0
                assert held(stage, m).total == before - released
                assert held(stage, m).runtime + kept >= held(stage, m).total  # every byte that stays has a reason
                assert of_stage.buffers.used >= moved
        for m in reversed(range(3)):
            if moves:
                stage.start_fetch(m)
                stage.join_fetch(m)
            outputs += stage.backward(m, (torch.ones(TOKENS, WIDTH),), defer=True)
            stage.weight(m)
        results.append([*outputs, *[p.grad for p in stage.module.parameters() if p.grad is not None]])
        stage.check_empty()
        freed = [reference() is None for reference in recorders]
        gc.enable()
        assert all(freed[:-1])  # routes are decisions; the collector has not run. The last route counts bytes
        assert len(freed) == 3
        assert of_stage.buffers.used == 0
        of_stage.close()
        assert of_stage.buffers.held == 0
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Tables(nn.Module):
    """Multiplies by a part of a table that is no parameter, by a buffer and by a weight; gathers, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = torch.randn(64, 4), nn.Parameter(torch.randn(4))
        self.register_buffer("fixed", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * x * self.table[8:16] * self.fixed * self.weight
        q, k, v = (x.repeat(1, 3) * 2).chunk(3, -1)
        index = torch.arange(8).flip(0)[:, None].expand(8, 4)
        y: Tensor = (q * k.exp() * v).gather(0, index)
        return functional.dropout(y, 0.5) * y.mean(1, keepdim=True)


@pytest.mark.usefixtures("watched")
def test_what_stays_is_named_with_its_reason() -> None:
    batch = torch.randn(16, 4)
    stage = stage_of(Tables(), batch[:8], least=100)
    for m in range(2):
        stage.forward(m, (batch[8 * m : 8 * m + 8],))
        stage.start_offload(m)
        stage.join_offload(m)
    account = stage.offload.account
    shares = {reason: sum(n for (_, of), n in account.kept.items() if of is reason) for reason in Reason}
    assert shares[Reason.SHARED] == 2 * 2 * 8 * 4 * 4  # the rows of the batch, and of the table
    assert shares[Reason.INDEX] == 2 * 8 * 8
    assert shares[Reason.SMALL] == 2 * 8 * 4  # the means
    assert shares[Reason.HELD] == shares[Reason.ROLE] == 0
    assert account.released == account.moved > 0
    assert {segment for segment, _ in account.kept} == {"the stage"}
    for m in range(2):
        stage.start_fetch(m)
        stage.join_fetch(m)
        stage.backward(m, (torch.ones(8, 4),))


class Cached(nn.Module):
    """Multiplies by a whole table that outlives the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 * self.table


@pytest.mark.usefixtures("watched")
def test_what_somebody_else_holds_is_said_once_and_then_left_out() -> None:
    stage = stage_of(Cached(), torch.randn(8, 4))
    account = stage.offload.account
    stage.forward(0, (torch.randn(8, 4),))
    with pytest.warns(UserWarning, match=r"stage 0: 128 bytes of the stage were copied to the host and stay on the"):
        round_trip(stage, 0)
    stage.forward(1, (torch.randn(8, 4),))
    round_trip(stage, 1)
    assert (account.moved, account.released) == (128, 0)
    assert account.kept == {("the stage", Reason.HELD): 256}
    (of_input,) = stage.backward(1, (torch.ones(8, 4),))
    assert torch.equal(of_input, 2 * stage.module.table)


@pytest.mark.usefixtures("watched")
def test_whoever_reads_what_is_away_is_refused() -> None:
    stage, x = moe_stage(Recompute()), torch.randn(TOKENS, WIDTH)
    stage.set_offload(OffloadSettings(StreamLanes()))
    stage.forward(0, (x.clone(),))
    boxes = stage.offload.of(0)._shelf.boxes()
    assert {box.name.split(", ")[1] for box in boxes} >= {"0.attention", "1.experts"}
    notes = [box.value for box in boxes]
    storages = [weak_storage(box.value(0)) for box in boxes]
    with pytest.raises(StageError, match=r"an offload is joined of what is on the device, and not on its way to the"):
        stage.join_offload(0)
    stage.start_offload(0)
    with pytest.raises(StageError, match=r"stage 0, 0.attention: a saved tensor is read while it is on its way to the"):
        notes[0](0)
    stage.join_offload(0)
    assert all(weak.expired() for weak in storages)
    with pytest.raises(StageError, match=r"stage 0, 0.attention: a saved tensor is read while it is on the host"):
        notes[0](0)
    with pytest.raises(StageError, match=r"stage 0: the backward of microbatch 0 comes while what its forward saved"):
        stage.backward(0, (x,))
    with pytest.raises(StageError, match=r"stage 0: microbatch 1 holds nothing that moves to the host"):
        stage.start_offload(1)
    stage.start_fetch(0)
    with pytest.raises(StageError, match="is read while it is on its way from the host"):
        notes[0](0)
    stage.join_fetch(0)
    assert notes[0](0).shape
    stage.backward(0, (x,))


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.exp()
        return self.kept * 2


def test_a_saved_tensor_that_was_written_to_does_not_leave() -> None:
    stage = stage_of(Written(), torch.randn(8, 4))
    module: Any = stage.module
    stage.forward(0, (torch.randn(8, 4),))
    module.kept.add_(1)
    with pytest.raises(StageError, match=r"stage 0, the stage: a tensor that the backward needs has been written to"):
        stage.start_offload(0)
    stage.reset()
    stage.forward(0, (torch.randn(8, 4),))
    stage.start_offload(0)
    module.kept.add_(1)
    with pytest.raises(StageError, match="has been written to"):
        stage.join_offload(0)
    stage.reset()
    assert stage.offload.offload.lanes.buffers.used == 0


@pytest.mark.usefixtures("watched")
def test_roles_and_microbatches_choose_what_moves() -> None:
    stage, x = moe_stage(Recompute()), torch.randn(TOKENS, WIDTH)
    with pytest.raises(StageError, match="stage 0 has no segments of the roles attention_of_others"):
        stage.set_offload(OffloadSettings(StreamLanes(), roles=frozenset({"experts", "attention_of_others"})))
    stage.set_offload(OffloadSettings(StreamLanes(), roles=frozenset({"experts"}), microbatches=frozenset({1})))
    for m in range(2):
        stage.forward(m, (x.clone(),))
    with pytest.raises(StageError, match="microbatch 0 holds nothing that moves"):
        stage.start_offload(0)
    round_trip(stage, 1)
    assert {segment for segment, reason in stage.offload.account.kept if reason is Reason.ROLE} >= {"0.attention"}
    assert not [segment for segment, _ in stage.offload.account.kept if segment.endswith("experts")]
    for m in range(2):
        stage.backward(m, (x,))
    with torch.no_grad():
        stage.forward(0, (x,))
    assert stage.offload._in_flight == {}


def test_host_buffers_are_used_again_and_fall_back_to_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers()
    first = buffers.take(10_000)
    assert first.nbytes == rounded(10_000) == 12_288
    buffers.give(first)
    assert buffers.take(9_000) is first
    second = buffers.take(9_000)
    assert second is not first
    buffers.give(first)
    assert buffers.take(100_000).nbytes == rounded(100_000)  # in place of the free one, which is too small
    assert buffers.held == second.nbytes + rounded(100_000) == buffers.used
    empty = torch.empty

    def refuses(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuses)
    pinned = HostBuffers(gpu.GpuDevice(torch.device("cuda")))
    with pytest.warns(UserWarning, match=r"4,096 bytes of pinned host memory cannot be had \(CUDA error"):
        pinned.take(100)
    pinned.take(100)  # says it once


def test_a_thread_keeps_no_tensor_of_a_work() -> None:
    lanes, tensor = ThreadLanes(), torch.ones(4)
    weak = weak_storage(tensor)
    handle = lanes.run("d2h", lambda kept=tensor: None)  # type: ignore[misc]
    del tensor
    lanes.join(handle)
    assert weak.expired()

    def fails() -> None:
        raise ValueError("no such host")

    with pytest.raises(ValueError, match="no such host"):
        lanes.join(lanes.run("d2h", fails))
    lanes.close()


def test_parts_of_a_buffer_begin_at_multiples_that_any_type_allows() -> None:
    assert starts_in_buffer([1, 600, 0, 512]) == [0, 512, 1536, 1536, 2048]
    assert starts_in_buffer([]) == [0]
