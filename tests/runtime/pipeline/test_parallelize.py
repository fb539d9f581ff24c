"""Stages that a user's function changes, and norms and means over replicas, experts and shards on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import schedc
from schedc_runtime import Loss, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.shards import parameters_of_experts
from schedc_runtime.testing import pool
from support.runtime_cases import VOCAB, next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe


def token_loss(logits: Tensor, targets: Tensor) -> Loss:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return Loss(total, (targets != -100).sum())


@pytest.mark.processes
def test_norms_and_means_on_processes() -> None:
    """Four meshes of two processes: two ranks, replicas, shared experts, shards; and what one process gives."""
    first, second = pool(2).run("runtime.pipeline.test_parallelize:train", timeout=120)
    assert first == second
    expected = {
        name: step(name, mesh, in_process=True)
        for name, mesh in (("ranks", Mesh(2)), ("replicas", Mesh(1, data=2)), ("experts", Mesh(1, experts=2)))
    }
    for name, values in first.items():
        assert values == pytest.approx(expected.get(name, expected["replicas"]), rel=1e-13), name


def train(rank: int, world_size: int) -> dict[str, list[float]]:
    meshes = {
        "ranks": Mesh(2),
        "replicas": Mesh(1, data=2),
        "experts": Mesh(1, experts=2),
        "shards": Mesh(1, data=2, shard_dense=True),
        "own shards": Mesh(1, data=2),
    }
    return {name: step(name, mesh, in_process=False) for name, mesh in meshes.items()}


def step(name: str, mesh: Mesh, in_process: bool) -> list[float]:
    """Two steps with clipping: the losses, and the norms before."""
    model: nn.Module = small_moe(2, 0) if name == "experts" else small_gpt(blocks=4)
    program = schedc.compile("zbh1", P=mesh.pipeline, M=2)
    pipe = Pipeline(model, program, loss_fn=token_loss, mesh=mesh, in_process=in_process, timeout=60)
    if name == "own shards" and not in_process:
        pipe.parallelize(shard_blocks)
        assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
    optimizer, results = torch.optim.SGD(pipe.parameters(), lr=0.5), []
    for seed in range(2):
        batch, targets = tokens(4 * mesh.replicas, seed=seed)
        targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -100
        if not in_process and mesh.replicas > 1:
            batch, targets = (part.chunk(2)[pipe.replica] for part in (batch, targets))
        loss = pipe.step(batch, targets)
        results += [loss.item(), pipe.clip_grad_norm_(0.5).item()]
        optimizer.step()
        pipe.zero_grad()
    pipe.close()
    return results


def shard_blocks(stage: nn.Module, mesh: Any) -> None:
    for name, block in stage.named_modules():
        if name in ("blocks.1", "blocks.2"):
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


@pytest.mark.processes
def test_shards_over_others_than_replicas_are_refused() -> None:
    """Each rank of an expert group has other experts, which add up to nothing. Experts that are left out train on."""
    for told in pool(2).run("runtime.pipeline.test_parallelize:sharded", timeout=120):
        assert "`blocks.0.mlp.experts.gate_up` was sharded" in told["all"]
        assert "ignored_params" in told["all"]
        assert "sharded over the processes" in told["alone"]
        assert "its replicas are [0, 1]" in told["alone"]
        assert told["dense"] == told["whole"]


def sharded(rank: int, world_size: int) -> dict[str, Any]:
    """By what is sharded: what was refused, or a loss and the sum of each whole gradient."""

    def left_out(stage: nn.Module, mesh: Any) -> None:
        fully_shard(stage, mesh=mesh["dp"], ignored_params={p for _, p in parameters_of_experts(stage)})

    ways: dict[str, tuple[Mesh, Any]] = {
        "all": (Mesh(1, experts=2), lambda stage, mesh: fully_shard(stage, mesh=mesh["dp"])),
        "alone": (Mesh(1, data=2), lambda stage, mesh: fully_shard(stage, mesh=alone())),
        "dense": (Mesh(1, experts=2), left_out),
        "whole": (Mesh(1, experts=2), None),
    }
    return {name: _sharded(*way) for name, way in ways.items()}


def alone() -> Any:
    """A mesh of this process by itself."""
    return DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("each", "one"))["one"]


def _sharded(mesh: Mesh, function: Any) -> Any:
    model = small_moe(2, 0)
    pipe = Pipeline(model, schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, mesh=mesh, timeout=60)
    try:
        if function is not None:
            pipe.parallelize(function)
        batch, targets = (part.chunk(2)[pipe.replica] for part in tokens(8))
        loss = pipe.step(batch, targets).item()
        grads = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
        whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        return [loss, {name: grad.sum().item() for name, grad in whole.items()}]
    except RuntimeFault as refused:
        return str(refused)
    finally:
        pipe.close()


def test_a_function_may_change_stages_in_one_process() -> None:
    pipe = Pipeline(small_gpt(), schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, in_process=True)
    seen = []
    pipe.parallelize(lambda stage, mesh: seen.append((stage, mesh)))
    assert [stage for stage, _ in seen] == list(pipe.modules)
    assert {mesh for _, mesh in seen} == {None}
    assert pipe.step(*tokens(4)).isfinite()


@pytest.mark.processes
def test_a_rank_without_parameters_is_named() -> None:
    assert pool(2).run("runtime.pipeline.test_parallelize:bare") == [
        "",
        "rank 1 holds no parameters (its stages are [1])",
    ]


class Tail(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def bare(rank: int, world_size: int) -> str:
    import warnings

    from schedc_runtime import Cut

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, VOCAB), nn.Linear(VOCAB, VOCAB), Tail(), Tail())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline(
            model, schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, cut=Cut(split_points=["2"]), timeout=30
        )
    pipe.step(*tokens(4))
    pipe.close()
    texts = [str(each.message) for each in caught if "its stages are" in str(each.message)]
    return texts[0].split(":")[0] if texts else ""
