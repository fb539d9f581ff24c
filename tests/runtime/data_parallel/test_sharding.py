"""The dense part of a pipeline under FSDP2: the same bits as whole replicas, with a part of the memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import schedc
from runtime.data_parallel.sharding_cases import DROPPING, MODELS, dropping
from schedc.compiler import compile_at
from schedc.ir.parallel import Parallel
from schedc.ir.works import WorkKind
from schedc.load.library import Text
from schedc.plan import Plan
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc_runtime import Pipeline
from schedc_runtime.data_parallel.stage_replicas import check_sharding
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.pipeline.build.apply_plan import mesh_for
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.testing import pool
from support.mesh_cases import batch_of
from support.runtime_cases import next_token_loss, small_gpt
from support.sweeps import halved, in_sweeps, swept, thinned
from support.warm_command import run_schedc

SHARDED = [
    ("dropping", "gpt", 1, 2, False),
    ("1f1b", "mixed", 1, 2, True),
    ("dualpipev", "moe", 2, 1, False),
    ("1f1b", "tied", 1, 2, False),
    ("zbh1", "gpt", 1, 2, False),
    ("1f1b", "chunked", 1, 2, False),
]


@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "kind", "experts", "data", "rs"), swept(SHARDED, SHARDED[2:3]))
def test_sharded_dense_parts_give_the_bits_of_whole_ones(
    schedule: str, kind: str, experts: int, data: int, rs: bool
) -> None:
    arguments = {"schedule": schedule, "kind": kind, "experts": experts, "data": data, "rs": rs}
    for results in pool(4).run("runtime.data_parallel.sharding_cases:parity", timeout=120, **arguments):
        assert results["wrong"] == []
        assert results["compared"] > 40
        assert results["names sharded"] == results["names plain"]
        assert results["loaded plain"]
        assert results["loaded sharded"]
        assert results["sharded plain"] == 0
        assert results["sharded sharded"] > 10
        assert results["experts sharded"] == []
        if kind in ("gpt", "mixed", "chunked"):
            assert results["held sharded"] <= 0.51 * results["held plain"]


@pytest.mark.sweep
@pytest.mark.processes
def test_updates_of_shards_beside_whole_parameters_have_the_bits_of_whole_ones() -> None:
    """Experts and tied weights stay whole: factors, scalers, norms that scale, and optimizers that take all at once."""
    cases = [("moe", 2, 1, {"foreach": True}), ("tied", 1, 2, {"fused": True}), ("mixed", 1, 2, {"foreach": True})]
    cases = thinned(cases, 3)
    for wrong in pool(4).run("runtime.data_parallel.sharding_cases:updates", timeout=240, cases=cases):
        assert wrong == [[]] * len(cases)


@pytest.mark.processes
def test_snapshots_have_the_shards_before_the_step() -> None:
    for results in pool(4).run("runtime.data_parallel.sharding_cases:snapshots", timeout=120, schedule="1f1b"):
        assert results["wrong"] == []
        assert results["shards"] > 10
        assert results["moments"] > 30


@pytest.mark.parametrize(
    ("schedule", "mesh", "message"),
    [
        ("1f1b", Mesh(2), "the mesh has one replica"),
        ("dualpipe", Mesh(2, 1, 2), "dualpipe holds two copies of every stage"),
    ],
)
def test_what_cannot_be_sharded_is_refused(schedule: str, mesh: Mesh, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        check_sharding(schedc.compile(schedule, P=2, M=4), mesh)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "kind"),
    halved(
        [
            ("1f1b", Mesh(2, data=3), "mixed"),
            ("zbv", Mesh(1, experts=2), "moe"),
            ("interleaved_1f1b", Mesh(2, data=2), "gpt"),
        ]
    ),
)
def test_replicas_in_one_process_are_sharded_with_the_same_bits(schedule: str, mesh: Mesh, kind: str) -> None:
    """Also behind a step that failed, for values that were loaded, and in evaluation between two steps.

    The interleaved program was compiled with its works: under a memory that asks for drops between far uses.
    """
    program = schedc.compile(schedule, P=mesh.pipeline, M=4)
    batch, targets = batch_of(mesh, program.microbatches)
    runs = []
    for shard in (False, True):
        if shard and schedule == "interleaved_1f1b":
            program = dropping()
            assert (program.works.kind == WorkKind.GATHER).sum() == 6
        pipe = Pipeline(
            MODELS[kind](program.stages), program, loss_fn=next_token_loss, mesh=replace(mesh, shard_dense=shard),
            in_process=True, example=batch.chunk(mesh.replicas)[0],
        )  # fmt: skip
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        tensors = {"loss": pipe.step(batch, targets), "again": pipe.step(batch, targets)}
        norm, largest = pipe.clip_grad_norm_(math.inf), pipe.clip_grad_norm_(math.inf, math.inf)
        pipe.clip_grad_norm_(float(largest) / 3, math.inf)  # the largest of parts is that of the whole, bit by bit
        tensors["clipped"] = pipe.clip_grad_norm_(math.inf, math.inf)
        assert tensors["clipped"] < 0.34 * largest
        optimizer.step()
        optimizer.zero_grad()
        tensors |= {"evaluated": pipe.evaluate(batch, targets)} | pipe.full_state_dict()
        pipe.load_state_dict({name: 0.9 * value for name, value in pipe.full_state_dict().items()})
        with pytest.raises(InstructionError):
            pipe.step(batch, targets.double())
        pipe.zero_grad()
        tensors |= {"recovered": pipe.step(batch, targets)}
        optimizer.step()
        tensors |= {f"later {name}": value for name, value in pipe.full_state_dict().items()}
        runs.append((tensors, norm, sum(parameter.numel() for parameter in pipe.parameters())))
    (plain, norm, size), (sharded, norm_of_parts, size_of_parts) = runs
    assert plain.keys() == sharded.keys()
    assert [name for name in plain if not torch.equal(plain[name], sharded[name])] == []
    torch.testing.assert_close(norm_of_parts, norm, rtol=1e-14, atol=0)  # parts are squared and added apart
    if kind == "mixed":
        assert size_of_parts == size // mesh.data


def test_works_of_another_model_are_refused_and_one_replica_needs_none() -> None:
    summing = DROPPING.replace("  shard dense\n", "").replace("60", "99")
    program = compile_at(Text(Source("", summing)), {}, Costs(dp=1.0), replicas=2)
    assert set(program.works.kind.tolist()) == {WorkKind.SCATTER, WorkKind.SPREAD}
    batch, _ = batch_of(Mesh(2, data=2), program.microbatches)
    options: dict[str, Any] = {"loss_fn": next_token_loss, "in_process": True, "example": batch.chunk(2)[0]}
    with pytest.raises(RuntimeFault, match=r"not those of the model; one differs: rank 0: drop of stage 0"):
        Pipeline(small_gpt(), program, mesh=Mesh(2, data=2, shard_dense=True), **options)
    assert not len(Pipeline(small_gpt(), program, **options).program.works)
    pipe = Pipeline(small_gpt(), program, mesh=Mesh(2, data=2), **options)
    assert pipe.program.works == program.works
    assert not len(pipe._assembly.own.alone.works)


def test_a_plan_shards_as_a_mesh_does() -> None:
    program, mesh, parallel = schedc.compile("1f1b", P=2, M=2), Mesh(2, data=2), Parallel(dp=2, zero=1)
    assert mesh_for(Plan(shard_dense=True), program, mesh) == replace(mesh, shard_dense=True)
    assert mesh_for(Plan(), program, mesh) == mesh
    with pytest.raises(RuntimeFault, match="the plan says `shard dense` and zero 1"):
        mesh_for(Plan(shard_dense=True, parallel=parallel), program, None)


ZERO_3 = """sched 1

plan sharded = 1f1b(P = 1, M = 2) {
  layers 2 dense 1
  experts 4 top 2 width 8 hidden 16
  topology nodes 1 x 2
  parallel tp 1 cp 1 ep 2 dp 4 zero 3 devices 4
}
"""


@in_sweeps("test_sharded_dense_parts_give_the_bits_of_whole_ones")
@pytest.mark.slow
@pytest.mark.processes
def test_a_run_compares_the_rows_that_each_rank_holds(tmp_path: Path) -> None:
    plan = tmp_path / "sharded.sched"
    plan.write_text(ZERO_3, encoding="utf-8")
    done = run_schedc(["run", str(plan), "--check", "bitwise", "--steps", "2", "--width", "16", "--tokens", "8"])
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (
        0, ["check passed: loss and gradients of 2 steps, all ranks"],
    ), done.stderr  # fmt: skip
