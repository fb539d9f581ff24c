"""Cases of a sharded dense part, run on every rank of a pool of processes: importable, with JSON in and out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedc.compiler import compile as compile_schedule
from schedc.compiler import compile_at
from schedc.ir.program import Program
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc_runtime import ChunkedLoss, Loss, Pipeline
from schedc_runtime.pipeline.step.norms import NonFiniteNorm
from schedc_runtime.ranks.mesh import Mesh
from support.mesh_cases import batch_of
from support.recompute_cases import with_rs
from support.runtime_cases import next_token_loss, small_gpt
from support.segmented_cases import small_moe

DROPPING = """sched 1
plan dropping = interleaved_1f1b(P = 2, M = 4, v = 2) {
  layers 4
  parameters dense 10
  memory 60
  shard dense
}
"""


def dropping() -> Program:
    """A program with its works, in which two stages are dropped between far uses and gathered again."""
    return compile_at(Text(Source("", DROPPING)), {}, Costs(dp=0.1), replicas=2)


def parity(rank: int, world_size: int, schedule: str, kind: str, experts: int, data: int, rs: bool) -> dict[str, Any]:
    """Two optimizer steps with and without sharding: what differs, with names and sizes of the parameters held."""
    microbatches = 4 if schedule == "dualpipev" else 2
    drops = schedule == "dropping"
    program = dropping() if drops else compile_schedule(schedule, P=2, M=microbatches)
    program = with_rs(program) if rs else program
    mesh = Mesh(2, experts, data)
    batch, targets = batch_of(mesh, program.microbatches)
    results = []
    for shard in (False, True):
        model = MODELS[kind](program.stages)
        names = list(model.state_dict())
        pipe = Pipeline(
            model,
            program if shard or not drops else compile_schedule("interleaved_1f1b", P=2, M=4, v=2),
            loss_fn=ChunkedLoss("head", chunk=5) if kind == "chunked" else next_token_loss,
            mesh=replace(mesh, shard_dense=shard),
            timeout=60,
            example=batch.chunk(mesh.replicas)[0],
        )
        results.append(_trained(pipe, batch, targets))
        parameters = dict(pipe.named_parameters())
        sharded = [name for name, p in parameters.items() if isinstance(p, DTensor)]
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters.values())
        results[-1]["held"] = held
        results[-1]["sharded"] = len(sharded)
        results[-1]["experts"] = [name for name in sharded if ".experts." in name]
        results[-1]["names"] = [name for name in names if name in pipe.state_dict()]
        pipe.load_state_dict(
            {name: torch.ones_like(value) for name, value in model_state(kind, program.stages).items()}
        )
        loaded = [_whole(p) for p in parameters.values()]
        results[-1]["loaded"] = all(bool((value == 1).all()) for value in loaded)
        pipe.close()
    plain, sharded_run = results
    wrong = [key for key in plain["tensors"] if not torch.equal(plain["tensors"][key], sharded_run["tensors"][key])]
    return {
        "wrong": wrong + [key for key in sharded_run["tensors"] if key not in plain["tensors"]],
        "compared": len(plain["tensors"]),
        **{f"{key} {name}": x[key] for name, x in (("plain", plain), ("sharded", sharded_run)) for key in FACTS},
    }


def updates(rank: int, world_size: int, cases: list[tuple[str, int, int, dict[str, bool]]]) -> list[list[str]]:
    """Per case what of two updates differs from those of whole replicas. cases: kind, expert ranks, further replicas,
    and how the optimizer goes through its parameters."""
    return [_updates(*case) for case in cases]


def _updates(kind: str, experts: int, data: int, how: dict[str, bool]) -> list[str]:
    program, mesh = compile_schedule("1f1b", P=2, M=2), Mesh(2, experts, data)
    plain, sharded = [_updated(kind, program, replace(mesh, shard_dense=shard), how) for shard in (False, True)]
    assert plain.keys() == sharded.keys()
    return [key for key in plain if not torch.equal(plain[key], sharded[key])]


def _updated(kind: str, program: Program, mesh: Mesh, how: dict[str, bool]) -> dict[str, Tensor]:
    """Two updates: calls with other counts that add up, a scaler, a norm that scales. Then a gradient that is NaN."""
    batch, targets = batch_of(mesh, program.microbatches)
    targets = targets.where(torch.rand(targets.shape, generator=torch.Generator().manual_seed(3)) < 0.7, -100)
    pipe = Pipeline(
        MODELS[kind](2), program, loss_fn=_counted_loss, mesh=mesh, timeout=60, example=batch.chunk(mesh.replicas)[0]
    )
    mine = [part.chunk(mesh.replicas)[pipe.replica] for part in (batch, targets)]
    fewer = mine[0], mine[1].where(torch.arange(mine[1].shape[1]) < 3, -100)
    optimizer, scaler = (
        torch.optim.AdamW(pipe.parameters(), lr=1e-2, **how),
        torch.amp.GradScaler("cpu", init_scale=256.0),
    )
    results: dict[str, Tensor] = {}
    for step, largest in enumerate((1.0, 0.5)):
        for number, part in enumerate((mine, fewer)):
            results[f"loss {step} {number}"] = pipe.step(*part, accumulate=2, scale=scaler.get_scale())
        pipe.unscale_(scaler, optimizer)
        norm = pipe.clip_grad_norm_(math.inf, math.inf)
        results[f"norm {step}"] = pipe.clip_grad_norm_(float(largest * norm) / 2, math.inf)
        clipped = pipe.clip_grad_norm_(math.inf, math.inf)
        assert clipped < 0.51 * norm, "the norm scales"
        results |= {f"grad {step} {name}": _whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results |= {f"value {step} {name}": _whole(p).detach().clone() for name, p in pipe.named_parameters()}
    pipe.step(*mine, scale=scaler.get_scale())
    if mesh.process(pipe.places[0]) == 0:
        _here(next(p.grad for p in pipe.parameters() if p.grad is not None)).flatten()[0] = math.nan
    with pytest.raises(NonFiniteNorm):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pipe.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(_whole(p), results[f"value 1 {name}"]) for name, p in pipe.named_parameters())
    (group,) = optimizer.param_groups
    assert list(map(id, group["params"])) == list(map(id, pipe.parameters()))
    pipe.close()
    return results


def _counted_loss(output: Tensor, target: Tensor) -> Loss:
    """The sum over targets that count, for parts of a whole."""
    summed = torch.nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return Loss(summed, (target != -100).sum())


def snapshots(rank: int, world_size: int, schedule: str) -> dict[str, Any]:
    """Steps with snapshots of sharded parameters: the names whose copies differ from the state before the step."""
    program, mesh = compile_schedule(schedule, P=2, M=4), Mesh(2, 1, 2, shard_dense=True)
    batch, targets = batch_of(mesh, program.microbatches)
    pipe = Pipeline(small_gpt(2), program, loss_fn=next_token_loss, mesh=mesh, timeout=60, example=batch.chunk(2)[0])
    mine = [part.chunk(2)[pipe.replica] for part in (batch, targets)]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    wrong, shards = [], 0
    for step in range(3):
        before = {name: _here(value).clone() for name, value in pipe.state_dict().items()}
        moments = {
            (number, name): _here(value).clone()
            for number, own in optimizer.state_dict()["state"].items()
            for name, value in own.items()
        }
        pipe.step(*mine, snapshot=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        taken = pipe.snapshot()
        assert taken.optimizer is not None
        shards = sum(isinstance(value, DTensor) for value in taken.model.values())
        wrong += [
            f"{step} {name}" for name, value in before.items() if not torch.equal(value, _here(taken.model[name]))
        ]
        wrong += [
            f"{step} {number} {name}"
            for (number, name), value in moments.items()
            if not torch.equal(value, _here(taken.optimizer["state"][number][name]))
        ]
        whole = {name: value.full_tensor() for name, value in taken.model.items() if isinstance(value, DTensor)}
        wrong += [name for name, value in whole.items() if value.shape != model_state("gpt", 2)[name].shape]
    pipe.close()
    return {"wrong": wrong, "shards": shards, "moments": len(moments)}


def _here(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Scaled(nn.Module):
    """A block whose output is scaled by a parameter of another type."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.scale = block, nn.Parameter(torch.full((width,), 0.75))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.block(x)


def mixed_gpt(blocks: int) -> nn.Module:
    """A GPT in float64 with some parameters in float32 on every stage."""
    model = small_gpt(blocks)
    model.blocks = nn.ModuleList(Scaled(block, model.config.width) for block in model.blocks)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": small_gpt, "tied": lambda blocks: small_gpt(blocks, tied=True), "mixed": mixed_gpt,
    "moe": lambda blocks: small_moe(blocks // 2, blocks // 2), "chunked": small_gpt,
}  # fmt: skip
"""By kind: a model of so many blocks."""

FACTS = ("held", "sharded", "experts", "names", "loaded")


def model_state(kind: str, blocks: int) -> dict[str, Tensor]:
    return MODELS[kind](blocks).state_dict()


def _trained(pipe: Pipeline, batch: Tensor, targets: Tensor) -> dict[str, Any]:
    mine = [part.chunk(pipe.mesh.replicas)[pipe.replica] for part in (batch, targets)]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    tensors: dict[str, Tensor] = {}
    for step in range(2):
        for accumulated in range(2 - step):  # gradients of two steps add up in the first
            tensors[f"loss {step} {accumulated}"] = pipe.step(*mine)
        tensors |= {f"grad {step} {name}": _whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        tensors[f"evaluated {step}"] = pipe.evaluate(*mine)
    tensors |= {f"value {name}": _whole(p) for name, p in pipe.named_parameters()}
    tensors |= {f"state {name}": value for name, value in pipe.full_state_dict().items()}
    return {"tensors": {name: value.detach().clone() for name, value in tensors.items()}}


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
