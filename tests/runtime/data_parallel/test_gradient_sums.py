"""Sums over replicas: which parameters travel in one bucket, and where the program's works start their sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedc
from schedc.ir.program import InstructionKind
from schedc.ir.works import WorkKind
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.data_parallel import gradient_sums
from schedc_runtime.data_parallel.gradient_sums import StageSums
from schedc_runtime.data_parallel.hot_returns import trained_by
from schedc_runtime.data_parallel.stage_replicas import stage_replicas, summed_stages
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Coordinate, in_process_peer_groups
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved

pytestmark = pytest.mark.usefixtures("watched")


def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=dtype))


def test_buckets_hold_one_dtype_and_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 40)
    replicas = in_process_peer_groups(Mesh(1, data=2))[Coordinate(0, 0)].replicas
    first, second, third, wide = parameter(5), parameter(5), parameter(1), parameter(2, torch.float64)
    frozen = parameter(4).requires_grad_(False)
    names = {id(first): "first", id(second): "second", id(third): "third", id(wide): "wide", id(frozen): "frozen"}
    sums = StageSums([first, wide, frozen, second, third], replicas)

    def travelling() -> list[tuple[str, ...]]:
        return [tuple(names[id(p)] for p in bucket.parameters) for bucket in sums.buckets]

    assert travelling() == [("first", "second"), ("third",), ("wide",)]
    frozen.requires_grad_(True)
    assert travelling() == [("first", "frozen"), ("second", "third"), ("wide",)]


def test_experts_are_summed_where_they_are_held() -> None:
    groups = in_process_peer_groups(Mesh(1, experts=2, data=2))[Coordinate(0, 0)]
    pipe = Pipeline(small_gpt(), schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, in_process=True)
    (stage,) = pipe.held(Coordinate(0, 0))
    expert = stage.module.get_parameter("head.weight")
    expert.expert_parallel = True  # type: ignore[attr-defined]
    replicas = stage_replicas(pipe.program.instructions(0), {0: stage}, groups)
    sums = {(key.group, key.late): works.sums for key, works in replicas.items()}
    assert {key: {bucket.communicator for bucket in each.buckets} for key, each in sums.items()} == {
        (0, False): {groups.replicas}, (1, False): {groups.same_experts},
    }  # fmt: skip
    assert [works.sums.parameters for key, works in replicas.items() if key.group == 1] == [(expert,)]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["1f1b", "zbv", "dualpipe"]))
def test_sums_start_behind_the_last_weight_gradient(schedule: str) -> None:
    """A stage with a second copy starts behind the REDUCEs, which sum the copies."""
    program = schedc.compile(schedule, P=2, M=4)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=Mesh(2, data=2), in_process=True)
    pipe.step(*tokens(8))
    weights = {InstructionKind.B, InstructionKind.W, InstructionKind.CELL}
    for rank in range(2):
        held = {stage.index for stage in pipe.held(Coordinate(rank, 0))}
        stream = list(pipe.program.instructions(rank))
        starts = [
            (position, pipe.program.works.work(x.work))
            for position, x in enumerate(stream)
            if x.kind is InstructionKind.START
        ]
        scatters = [(position, work.stage) for position, work in starts if work.kind is WorkKind.SCATTER]
        assert sorted(stage for _, stage in scatters) == sorted(held)
        assert len(starts) == 2 * len(held)
        for position, stage in scatters:
            later = stream[position:]
            assert not any(x.kind in weights and x.last_slot[0] == stage for x in later)
            assert not any(x.kind is InstructionKind.REDUCE for x in later)
            before = [x.last_slot[0] for x in stream[:position] if x.kind in weights]
            assert schedule == "dualpipe" or before[-1] == stage


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b", "dualpipev"])
def test_what_stages_of_a_rank_share_is_summed_with_the_one_that_is_complete_last(schedule: str) -> None:
    program = schedc.compile(schedule, P=2, M=4)
    for rank in range(2):
        modules: dict[int, nn.Module] = {
            int(stage): nn.Linear(2, 2) for stage in program.placement.stage_of_chunk[rank]
        }
        shared = nn.Parameter(torch.zeros(3))
        for module in modules.values():
            module.register_parameter("shared", shared)
        *_, last = (trained_by(x) for x in program.instructions(rank) if trained_by(x) >= 0)
        summed = summed_stages(program.instructions(rank), modules)
        assert [stage.index for stage in summed if any(p is shared for p in stage.now)] == [last]
        assert sorted(len(stage.now) for stage in summed) == [2, 3]


def test_a_pipeline_without_replicas_has_no_sums() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True)
    assert pipe.program == program


@pytest.mark.slow
def test_a_stage_that_had_nothing_to_train_is_not_trained_alone() -> None:
    model = small_gpt()
    stage = (model.token_embedding, model.position_embedding, *model.blocks[:2])
    for part in stage:
        part.requires_grad_(False)
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, mesh=Mesh(2, data=2), in_process=True)
    pipe.step(*tokens(4))
    for module in pipe.modules:
        module.requires_grad_(True)
    with pytest.raises(RuntimeFault, match="stage 0 is trained now"):
        pipe.step(*tokens(4))
