"""Steps of whole pipelines that move everything to the host and back: the same bits, and the storages are free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.execute.instruction_names import label, sentence
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.offload.account import Reason
from schedc_runtime.offload.lanes import AtOnce, ThreadLanes
from schedc_runtime.segments import SegmentedStage
from support.expert_cases import compiled
from support.offload_cases import Watch, accounts, moving, stepped
from support.recompute_cases import moe, with_rs
from support.runtime_cases import gradients, model_for, tokens

pytestmark = pytest.mark.slow

CASES: list[tuple[str, dict[str, int], str, bool, bool, Any]] = [
    ("1f1b", {"P": 2, "M": 3}, "", False, False, AtOnce),
    ("zbh1", {"P": 2, "M": 3}, "recompute act", True, True, ThreadLanes),
    ("dualpipev", {"P": 2, "M": 4}, "", True, False, AtOnce),
    ("interleaved_1f1b", {"P": 2, "M": 2}, "recompute full", False, True, AtOnce),
]
"""Schedule, sizes, line of recomputation, whether the model has experts, whether the program has Rs, lanes."""


@pytest.mark.parametrize(("schedule", "sizes", "line", "experts", "ahead", "lanes"), CASES, ids=[x[0] for x in CASES])
def test_gradients_keep_their_bits(
    schedule: str, sizes: dict[str, int], line: str, experts: bool, ahead: bool, lanes: Any
) -> None:
    blocks = max(4, schedc.compile(schedule, **sizes).stages)
    program = compiled(schedule, sizes, line, f"{blocks} dense 1")
    program = with_rs(program) if ahead else program
    model = (lambda: moe(0.2, blocks)) if experts else (lambda: model_for(program, dropout=0.2))
    expected, _ = stepped(program, model(), steps=1)
    watch = Watch()
    with moving(lanes) as of_ranks, watch():
        results, pipe = stepped(program, model(), steps=1)
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []
    assert results.keys() == expected.keys()
    bytes_of = accounts(pipe)
    assert watch.released == watch.moved == bytes_of["moved"] == bytes_of["released"] > 0
    assert watch.stayed == []
    assert bytes_of["kept"].keys() == {Reason.INDEX}
    assert isinstance(pipe._stages[pipe.places[0]][0], SegmentedStage) == experts
    assert [rank.buffers.used for rank in of_ranks] == [0] * program.ranks
    for rank in of_ranks:
        rank.close()


@pytest.mark.parametrize(
    ("schedule", "sizes", "lines"),
    [("dualpipev", {"P": 2, "M": 6}, "offload stage 0"), ("1f1b", {"P": 3, "M": 5}, "memory 2\n  offload auto")],
)
def test_offloads_of_a_plan_run(schedule: str, sizes: dict[str, int], lines: str) -> None:
    program = compiled(schedule, sizes, f"  host 100 at 1\n  {lines}")
    assert len(program.works) > 0
    experts = schedule == "dualpipev"
    expected, _ = stepped(compiled(schedule, sizes, ""), moe(0.2) if experts else model_for(program), steps=1)
    watch = Watch()
    with watch():
        results, pipe = stepped(program, moe(0.2) if experts else model_for(program), steps=1)
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []
    assert watch.released == watch.moved == accounts(pipe)["moved"] > 0
    assert {index for stage in pipe._held() if stage.offload for index in (stage.index,)} == {0}
    assert pipe.evaluate(*tokens(program.microbatches)).isfinite()
    named = [label(program, row) for row in range(len(program)) if program.work[row] >= 0]
    assert {"0START_OFFLOAD1", "0JOIN_OFFLOAD1", "0START_FETCH1", "0JOIN_FETCH1"} <= set(named)
    row = int((program.work >= 0).argmax())
    assert sentence(program, row).startswith(f"{named[0]}: start the offload of stage 0, microbatch")
    lanes = pipe._assembly.lanes
    assert sum(rank.buffers.held for rank in lanes) > 0
    pipe.close()
    assert sum(rank.buffers.held for rank in lanes) == 0


def test_a_step_that_fails_returns_its_buffers() -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    batch, targets = tokens(4)
    failing = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal failing
        failing -= 1
        if not failing:
            raise ArithmeticError("no loss")
        return next_token_loss(output, target)

    with moving() as lanes:
        pipe = Pipeline(model_for(program), program, loss_fn=loss_fn, in_process=True, example=batch)
        expected = pipe.step(batch, targets)
        grads = {name: grad.clone() for name, grad in gradients(pipe).items()}
        pipe.zero_grad()
        failing = 3  # the first rank has microbatches on the host by then
        with pytest.raises(InstructionError, match="no loss"):
            pipe.step(batch, targets)
        assert [rank.buffers.used for rank in lanes] == [0, 0]
        assert all(stage.in_flight == () and not stage.offload._in_flight for stage in pipe._held() if stage.offload)
        pipe.zero_grad()
        evaluated = pipe.evaluate(batch, targets)
        assert torch.equal(pipe.step(batch, targets), expected)
        assert accounts(pipe)["moved"] > 0
        assert all(torch.equal(grad, grads[name]) for name, grad in gradients(pipe).items())
        assert torch.equal(evaluated, expected)
    pipe.close()
