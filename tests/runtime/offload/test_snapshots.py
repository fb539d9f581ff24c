"""Snapshots: the state before a step, bit for bit, copied beside the step's compute."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from schedc.ir.program import InstructionKind
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkKind
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import StageError
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.measure.step_trace import chrome_trace
from schedc_runtime.offload.lanes import StreamLanes, ThreadLanes
from schedc_runtime.offload.snapshot import StageSnapshot
from schedc_runtime.pipeline.agree.batch import BatchRefused
from support.expert_cases import compiled
from support.simulated_cases import Normed, squares


@contextmanager
def pipeline(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """A pipeline moves activations beside its snapshots. lanes: makes its lanes."""
    monkeypatch.setattr("schedc_runtime.offload.lanes.lanes_for", lambda device: lanes())
    program = compiled("1f1b", {"P": 3, "M": 4}, "  host 10000 at 1\n  offload all", "3")
    assert len(program.works) > 0
    torch.manual_seed(0)
    model = nn.Sequential(*[Normed() for _ in range(3)])
    pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=torch.randn(8, 4), cut=Cut())
    yield pipe
    pipe.close()


def state_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("lanes", [StreamLanes, ThreadLanes])
def test_a_snapshot_is_the_state_before_its_step(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with pipeline(lanes, monkeypatch) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        with pytest.raises(StageError, match=r"stage 0 has no snapshot\n.*snapshot=True"):
            pipe.snapshot()
        buffers: list[int] = []
        for step in range(3):
            before = state_of(pipe)
            wanted = optimizer if step else True
            numbers = {n: {k: torch.as_tensor(v).clone() for k, v in own.items()}
                       for n, own in optimizer.state_dict()["state"].items()}  # fmt: skip
            pipe.step(rows, rows, snapshot=wanted, trace=True)
            optimizer.step()
            optimizer.zero_grad()
            taken = pipe.snapshot()
            assert taken.steps == step
            assert equal(taken.model, before)
            assert not equal(taken.model, state_of(pipe))
            assert (taken.optimizer is None) == (step == 0)
            if taken.optimizer is not None:
                assert taken.optimizer["param_groups"] == optimizer.state_dict()["param_groups"]
                assert taken.optimizer["state"].keys() == numbers.keys()
                assert all(equal(taken.optimizer["state"][number], numbers[number]) for number in numbers)
            buffers.append(taken.model["0.linear.weight"].data_ptr())
        assert buffers[1] == buffers[2]
        program = taken.program
        text = json.dumps(chrome_trace(program, pipe.trace()))
        assert "snapshot of stage 1" in text
        assert verify_program(program) == []
        taking = np.flatnonzero(program.works.kind == WorkKind.SNAPSHOT)
        stages = program.works.stage[taking]
        assert np.bincount(stages).tolist() == [8, 8, 8], "a piece beside each cell: four forwards and backwards"
        sizes = [sum(x.nbytes for x in module.state_dict().values()) for module in pipe.modules]
        state = [2 * sum(p.nbytes for p in m.parameters()) + 4 * 4 for m in pipe.modules]  # moments, steps
        whole = [sum(pair) for pair in zip(sizes, state, strict=True)]
        assert np.bincount(stages, program.works.bytes[taking]) == pytest.approx(whole)
        rows_of = [np.flatnonzero(program.work == work).tolist() for work in taking]
        compute = np.flatnonzero(program.kind <= InstructionKind.CELL)
        for rank in range(3):
            own = compute[program.rank[compute] == rank].tolist()
            mine = [rows for rows in rows_of if program.rank[rows[0]] == rank]
            before = [sum(cell < start for cell in own) for start, _ in mine]
            assert before == list(range(8)), "the next piece starts in front of the next cell"
            assert all(own[-1] < join for _, join in mine)
        pipe.load_state_dict(taken.model)
        optimizer.load_state_dict(taken.optimizer)
        assert equal(state_of(pipe), {name: value.clone() for name, value in taken.model.items()})


@pytest.mark.slow
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("lanes", [StreamLanes, ThreadLanes])
def test_a_step_that_fails_leaves_the_state_before_it(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(8, 4)
    with pipeline(lanes, monkeypatch) as pipe:
        before = state_of(pipe)
        block = next(m for m in pipe.modules[2].modules() if isinstance(m, Normed))
        block.fails = True
        with pytest.raises(InstructionError, match="no forward"):
            pipe.step(rows, rows, snapshot=True)
        assert equal(pipe.snapshot().model, before)
        pipe.load_state_dict(pipe.snapshot().model)
        block.fails = False
        pipe.zero_grad()
        pipe.step(rows, rows, snapshot=True)
        assert equal(pipe.snapshot().model, before)
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        with pytest.raises(BatchRefused, match="the optimizer has 1 parameters that no stage here holds"):
            pipe.step(rows, rows, snapshot=other)
        pipe.step(rows, rows)


@pytest.mark.parametrize("lanes", [StreamLanes, ThreadLanes])
@pytest.mark.parametrize("ends", [StageSnapshot.join, StageSnapshot.reset, StageSnapshot.release])
def test_clones_live_until_the_join(lanes: Any, ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of copies may read them until then; the allocator gives what is freed to compute at once."""
    gc.freeze()  # collections below look at new objects alone
    clones: list[weakref.ref[torch.Tensor]] = []
    clone = torch.Tensor.clone

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        clones.append(weakref.ref(copy := clone(tensor)))
        return copy

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    snapshot = StageSnapshot(Normed(), 0, lanes())
    for _ in range(2):
        snapshot.begin()
        snapshot.start()
        gc.collect()
        assert len(clones) == 3  # mean, variance and number of batches
        assert all(each() is not None for each in clones)
        ends(snapshot)
        gc.collect()
        assert all(each() is None for each in clones)
        clones.clear()
    snapshot.lanes.close()


def test_a_snapshot_for_which_the_host_has_no_room_is_refused_before_the_step() -> None:
    """Rank 0 has at most three microbatches of 2 KB on the host, beside its state of 152 bytes."""
    lines = "  memory 9 GB\n  activations dense 2 KB\n  host {} KB at 1 GB/s\n  offload all"
    model, rows = nn.Sequential(*[Normed() for _ in range(3)]), torch.randn(8, 4)
    for room, refused in ((6.1, True), (6.2, False)):
        program = compiled("1f1b", {"P": 3, "M": 4}, lines.format(room), "3")
        pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=rows, cut=Cut())
        with pytest.raises(BatchRefused, match=r"rank 0 has 6\.152 KB on the host") if refused else nullcontext():
            pipe.step(rows, rows, snapshot=True)
        pipe.close()
