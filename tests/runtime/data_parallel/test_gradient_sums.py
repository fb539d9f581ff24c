"""Sums over replicas: which parameters travel in one bucket, and where in the code their sums start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedc
from schedc.ir.program import InstructionKind
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.data_parallel import gradient_sums
from schedc_runtime.data_parallel.gradient_sums import buckets, start_sums, with_sums
from schedc_runtime.execute.code import Code
from schedc_runtime.ranks.mesh import Coordinate, in_process_peer_groups
from support.runtime_cases import next_token_loss, small_gpt, tokens


def parameter(size: int, dtype: torch.dtype = torch.float32, *, expert: bool = False) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(size, dtype=dtype))
    if expert:
        result.expert_parallel = True  # type: ignore[attr-defined]
    return result


def test_buckets_hold_one_dtype_of_one_group_and_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 40)
    groups = in_process_peer_groups(Mesh(1, experts=2, data=2))[Coordinate(0, 0)]
    first, second, third = parameter(5), parameter(5), parameter(1)
    wide, expert = parameter(2, torch.float64), parameter(3, expert=True)
    frozen = parameter(4).requires_grad_(False)
    result = buckets([first, wide, expert, frozen, second, third], groups)
    names = {id(first): "first", id(second): "second", id(third): "third", id(wide): "wide", id(expert): "expert"}
    assert [tuple(names[id(p)] for p in bucket.parameters) for bucket in result] == [
        ("first", "second"), ("third",), ("wide",), ("expert",),
    ]  # fmt: skip
    assert [bucket.communicator for bucket in result] == [*[groups.replicas] * 3, groups.same_experts]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_sums_start_behind_the_last_weight_gradient(schedule: str) -> None:
    """A stage with a second copy starts when the stream has ended, since REDUCE comes first."""
    program = schedc.compile(schedule, P=2, M=4)
    mesh = Mesh(2, data=2)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=mesh, in_process=True)
    pipe.step(*tokens(8))
    ((*_, executors),) = pipe._bound_code._bound.values()
    for place, executor in executors.items():
        code: Code = executor.code
        held = {stage.index for stage in pipe.held(place)}
        starts = [i for i, (handler, _) in enumerate(code.calls) if handler is start_sums]
        if schedule == "dualpipe":
            assert starts == []
            assert [handler for handler, _ in code.final] == [start_sums] * len(held)
            continue
        assert code.final == ()
        trained = {code.steps[i].instruction.last_slot[0] for i in starts}
        assert trained == held
        for i in starts:
            stage = code.steps[i].instruction.last_slot[0]
            weights = {InstructionKind.B, InstructionKind.W, InstructionKind.CELL}
            later = [s.instruction for s in code.steps[i:] if s.handler is not start_sums]
            assert not any(x.kind in weights and x.last_slot[0] == stage for x in later)


def test_a_pipeline_without_replicas_has_no_sums() -> None:
    groups = in_process_peer_groups(Mesh(1))[Coordinate(0, 0)]
    code = Code([], [], 0, {})
    assert with_sums(code, {}, groups) is code
