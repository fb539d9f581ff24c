"""What the tests of meshes run on every rank of a pool of processes: importable, with JSON in and out."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc.plan import Hot, Plan
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.parity.reference import Reference
from schedc_runtime.ranks.mesh import Mesh
from support.reference_runs import spread
from support.runtime_cases import next_token_loss, oracle, small_gpt, tokens
from support.segmented_cases import small_moe

ROWS = 2
"""Rows of one microbatch."""


def batch_of(mesh: Mesh, microbatches: int) -> tuple[Tensor, Tensor]:
    """The batches of all replicas, one after the other."""
    return tokens(ROWS * microbatches * mesh.replicas)


def expected(pipe: Pipeline, batch: Tensor, targets: Tensor) -> Reference:
    """Means over the replicas of what each computes by itself; exact, since there are two or four of them."""
    replicas = pipe.mesh.replicas
    parts = [oracle(pipe, *pair) for pair in zip(batch.chunk(replicas), targets.chunk(replicas), strict=True)]
    sums = dict(parts[0].grads)
    for part in parts[1:]:
        sums = {name: grad + part.grads[name] for name, grad in sums.items()}
    grads = {name: total / replicas for name, total in sums.items()}
    return Reference(torch.stack([part.loss for part in parts]).mean(), grads)


def parity(rank: int, world_size: int, cases: list[tuple[Any, ...]]) -> list[list[str]]:
    """Per case the parameters whose gradients are as expected. cases: schedule, sizes, expert ranks, further replicas,
    and whether embeddings are tied."""
    return [_parity(*case) for case in cases]


def _parity(schedule: str, sizes: dict[str, int], experts: int, data: int, tied: bool = False) -> list[str]:
    program = compile_schedule(schedule, **sizes)
    mesh = Mesh(program.ranks, experts, data)
    batch, targets = batch_of(mesh, program.microbatches)
    example = batch.chunk(mesh.replicas)[0]
    pipe = Pipeline(small_gpt(tied=tied), program, loss_fn=next_token_loss, mesh=mesh, timeout=30, example=example)
    mine = [part.chunk(mesh.replicas)[pipe.replica] for part in (batch, targets)]
    wanted = expected(pipe, batch, targets)
    for _ in range(2):  # gradients of two steps add up
        loss = pipe.step(*mine)
    assert abs(loss.item() - wanted.loss.item()) < 1e-12
    wrong = [name for name, p in pipe.named_parameters() if not same(p.grad, 2 * wanted.grads[name])]
    assert wrong == []
    pipe.close()
    return sorted(name for name, _ in pipe.named_parameters())


def balanced_moe() -> Any:
    """Two dense blocks, and two layers of experts with an auxiliary loss that is felt, and biases."""
    return small_moe(2, 2, routing=RouterConfig(8, 2, scores="sigmoid", biased=True, bias_rate=0.1, balance=2.0))


def auxiliary(rank: int, world_size: int, meshes: list[tuple[int, int]]) -> list[list[str]]:
    """Per (expert ranks, further replicas): what differs here from all ranks in one process, after a step."""
    return [_auxiliary(rank, every, *sizes) for sizes, every in zip(meshes, spread(_every_rank, meshes), strict=True)]


def _auxiliary(rank: int, every: list[dict[str, Any]], experts: int, data: int) -> list[str]:
    mesh = Mesh(1, experts, data)
    batch, targets = batch_of(mesh, 2)
    mine = Pipeline(
        balanced_moe(), _one_rank(), loss_fn=next_token_loss, mesh=mesh, plan=Plan(overlap=True), timeout=30
    )
    mine.step(*[part.chunk(mesh.replicas)[rank] for part in (batch, targets)])
    mine.update_biases()
    (place,) = mine.places
    own, wanted = _balanced(mine, place), every[rank]
    assert own.keys() == wanted.keys()
    assert all(value.any() for name, value in own.items() if name.startswith("bias"))
    mine.close()
    return [name for name, value in own.items() if not torch.equal(value, wanted[name])]


def _every_rank(sizes: tuple[int, int]) -> list[dict[str, Tensor]]:
    """[ranks] what `_balanced` says of each, of all ranks in one process."""
    mesh = Mesh(1, *sizes)
    every = Pipeline(balanced_moe(), _one_rank(), loss_fn=next_token_loss, mesh=mesh, in_process=True)
    every.step(*batch_of(mesh, 2))
    every.update_biases()
    return [_balanced(every, place) for place in sorted(every.places)]


def _one_rank() -> Program:
    return compile_schedule("zbh1", P=1, M=2)


def _balanced(pipe: Pipeline, place: Any) -> dict[str, Tensor]:
    """Gradients, auxiliary losses and biases at a place, by name."""
    modules = [stage.module for stage in pipe.held(place)]
    layers = [layer for module in modules for _, layer in moe_layers(module)]
    named = [(name, p.grad) for module in modules for name, p in module.named_parameters() if p.grad is not None]
    assert len(named) == sum(len(list(module.parameters())) for module in modules)
    return {
        **dict(named),
        **{f"loss {number}": torch.tensor(layer.statistics.balance_loss) for number, layer in enumerate(layers)},
        **{f"bias {number}": layer.router.bias for number, layer in enumerate(layers)},
    }


def same(mine: Any, wanted: Tensor) -> bool:
    return mine is not None and torch.equal(mine, wanted)


def disagreements(rank: int, world_size: int) -> list[str]:
    """Errors of replicas that were built or called differently."""
    errors = []
    program = compile_schedule("1f1b", P=2, M=2)
    mesh = Mesh(2, 1, 2)
    model = small_gpt()
    with torch.no_grad():
        model.head.weight[0, 0] += mesh.coordinate(rank).replica
    for attempt in (model, small_gpt()):
        try:
            pipe = Pipeline(attempt, program, loss_fn=next_token_loss, mesh=mesh, timeout=30)
            pipe.step(*tokens(2 * (1 + pipe.replica)))
        except Exception as error:
            errors.append(str(error).splitlines()[0])
    late = mesh.coordinate(rank).replica
    routings = RouterConfig(4, 2), RouterConfig(4, 2, balance=0.1 * late)
    for routing, plan in (routings[0], Plan(hot=Hot(1, 1.1 + late))), (routings[1], Plan()):
        try:
            Pipeline(small_moe(routing=routing), program, loss_fn=next_token_loss, mesh=mesh, plan=plan, timeout=30)
        except RuntimeFault as error:
            errors.append(str(error).splitlines()[0])
    return errors


def a_replica_fails(rank: int, world_size: int) -> list[str]:
    """Every rank's error when the loss function of one replica raises, and whether it came soon."""
    mesh = Mesh(2, 2)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        if mesh.coordinate(rank).replica == 1:
            raise ValueError("no such target")
        return next_token_loss(output, targets)

    program = compile_schedule("1f1b", P=2, M=2)
    pipe = Pipeline(small_moe(), program, loss_fn=loss_fn, mesh=mesh, timeout=120)
    began = time.monotonic()
    try:
        pipe.step(*tokens(2))
    except Exception as error:
        return [type(error).__name__, str(error), "soon" if time.monotonic() - began < 50 else "late"]
    return []
