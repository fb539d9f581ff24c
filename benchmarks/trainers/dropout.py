"""Trains models with dropout in pipelines, and compares them with autograd of the whole model under `named_random`.

The model has dropout as modules, one called twice in each block, and as functions, and it calls `rand_like`. A case is
one step in float64 with all ranks in one process, and has:

    against       what it is compared with
    bitwise       whether the losses of all microbatches and all gradients have the same bits
    difference    the largest difference of a loss or a gradient to serial autograd

Cases of `schedule` take every schedule of the library at P = 1, 2 and 4, as a whole and in segments. Cases of
`recompute` take each level. Autograd runs the whole model, microbatch by microbatch. The gradients of a parameter are
added in the order of the schedule: most schedules ascend, and one with two copies of a stage adds two sums. The
difference is to the ascending sum.

Cases of `alltoall` have experts on two replicas, whose experts see the rows of both in one product. Bits of autograd
cannot be had there, with or without dropout. So `bitwise` compares all methods with the method `flat`.

`us_per_unit` is what a dropout module costs more by name, CPU time in us, the least of many runs. `us_by_draw` has the
same for `functional.dropout` and for an operation that only the dispatch key meets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Recompute
from schedc.ir.program import Program, computation
from schedc.load.library import names
from schedc.plan import Plan
from schedc_runtime import Cut, Pipeline, named_random
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.random_numbers.numbering import Numbering, by_name

VOCABULARY, LENGTH, WIDTH, SEED = 16, 5, 8, 3
Results = dict[str, Tensor]


class Block(nn.Module):
    """An attention with `functional.dropout` on its weights, and one dropout module behind attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = functional.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.2, self.training)
        x = x + self.dropout(self.out(weights @ v))
        output: Tensor = x + self.dropout(functional.gelu(self.mlp(x)))
        return output


class Noisy(nn.Module):
    """Draws by functions between its blocks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks, self.last = nn.ModuleList([Block() for _ in range(8)]), nn.Dropout1d(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(tokens), 0.15, self.training)
        for number, block in enumerate(self.blocks):
            x = block(x) + (0.1 * torch.rand_like(x) if number % 3 == 1 else 0.0)
        logits: Tensor = self.head(self.last(functional.dropout(x, 0.25, self.training)))
        return logits


def measure() -> dict[str, Any]:
    """All cases, each as the module describes."""
    torch.set_num_threads(1)
    cases = [*_schedules(), *_levels(), *_methods()]
    costs = {kind: _cost(module) for kind, module in _DRAWS.items()}
    return {
        "bitwise": all(case["bitwise"] for case in cases),
        "difference": max(case["difference"] for case in cases),
        "us_per_unit": costs["module"],
        "us_by_draw": costs,
        "cases": cases,
    }


def _schedules() -> list[dict[str, Any]]:
    cases = []
    for name in names():
        for ranks in (1, 2, 4):
            program = _compiled(name, ranks)
            if program is None:
                continue
            parts = _serial(_noisy(), program.microbatches)
            for segmented in (False, True):
                results, stages = _piped(_noisy(), program, cut=Cut(segmented=segmented))
                case = {"case": "schedule", "schedule": name, "P": ranks, "segmented": segmented}
                cases.append(case | _compared(results, parts, program, stages))
    return cases


def _compiled(name: str, ranks: int) -> Program | None:
    """The schedule with at most eight stages and twice as many microbatches as ranks; None if it has no such size."""
    try:
        program = schedc.compile(name, P=ranks, M=2 * ranks)
    except DiagnosticError:
        return None
    return program if program.stages <= 8 else None


def _levels() -> list[dict[str, Any]]:
    cases = []
    parts = _serial(_noisy(), 4)
    program = schedc.compile("zbh1", P=2, M=4)
    for level in Level:
        for segmented in (False, True):
            plan = Plan(recompute=(Recompute(level),) * program.stages)
            results, stages = _piped(_noisy(), program, plan=plan, cut=Cut(segmented=segmented))
            case = {"case": "recompute", "level": level.name.lower(), "segmented": segmented}
            cases.append(case | _compared(results, parts, program, stages))
    return cases


def _methods() -> list[dict[str, Any]]:
    cases = []
    expected = _ascending(_serial(_experts(), 8))
    flat: Results = {}
    for method in ("flat", "hierarchical", "allgather"):
        for level in ("none", "full"):
            program = _planned(f"  alltoall {method}\n" + (f"  recompute {level}\n" if level != "none" else ""))
            results, _ = _piped(_experts(), program)
            flat = flat or results
            case = {"case": "alltoall", "method": method, "level": level, "against": "flat"}
            cases.append(case | {"bitwise": _same(results, flat), "difference": _difference(results, expected)})
    return cases


def _planned(lines: str) -> Program:
    """DualPipeV on two ranks, with experts on two replicas."""
    text = "sched 1\n\nplan tried = dualpipev(P = 2, M = 4) {\n  layers 4 dense 1\n"
    text += "  experts 8 top 2\n  topology nodes 2 x 1\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tried.sched"
        path.write_text(f"{text}  overlap auto\n{lines}}}\n", encoding="utf-8")
        return schedc.compile(f"{path}:tried")


def _noisy() -> nn.Module:
    torch.manual_seed(0)
    return Noisy().double()


def _experts() -> nn.Module:
    torch.manual_seed(0)
    return MoETransformer(
        MoEConfig(
            vocab=VOCABULARY, width=16, heads=2, dense_blocks=1, moe_blocks=3, inner=16, expert_inner=6, query_rank=8,
            key_value_rank=4, plain=4, rotary=4, value=4, routing=RouterConfig(8, 2), dropout=0.2,
        )
    ).double()  # fmt: skip


def _batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """[microbatches, LENGTH] tokens and targets."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCABULARY, (2, microbatches, LENGTH), generator=generator)
    return tokens, targets


def _serial(model: nn.Module, microbatches: int) -> list[Results]:
    """[microbatches] loss, and gradients by name: autograd of the whole model for one microbatch."""
    parts: list[Results] = []
    for number, (x, y) in enumerate(zip(*(part.split(1) for part in _batch(microbatches)), strict=True)):
        model.zero_grad()
        with named_random(model, seed=SEED, microbatch=number):
            loss = next_token_loss(model(x), y)
            (loss / microbatches).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        parts.append({"losses": loss.detach().reshape(1), **grads})
    return parts


def _ascending(parts: Sequence[Results]) -> Results:
    """The step of these microbatches, whose gradients are added in ascending order."""
    names = {name for part in parts for name in part}
    return {name: _added([range(len(parts))], parts, name) for name in names}


def _in_order(parts: Sequence[Results], program: Program, stages: Mapping[str, int]) -> Results:
    """The same, added in the order in which each rank computes the gradients of a stage. stages: by parameter."""
    schedule, _ = computation(program)
    weights = np.isin(schedule.kind, [OpKind.B, OpKind.W])
    orders: dict[int, list[list[int]]] = {}
    for stage in range(program.stages):
        ranks = np.unique(schedule.rank[schedule.stage == stage]).tolist()
        here = [weights & (schedule.stage == stage) & (schedule.rank == rank) for rank in ranks]
        orders[stage] = [schedule.microbatch[ops].tolist() for ops in here]
    return _ascending(parts) | {name: _added(orders[stage], parts, name) for name, stage in stages.items()}


def _added(orders: Sequence[Sequence[int]], parts: Sequence[Results], name: str) -> Tensor:
    """The sum over copies of the sums over microbatches, or the losses of all microbatches."""
    if name == "losses":
        return torch.cat([part[name] for part in parts])
    sums = [reduce(torch.add, [parts[m][name] for m in order if name in parts[m]]) for order in orders]
    return reduce(torch.add, sums)


def _piped(model: nn.Module, program: Program, **options: Any) -> tuple[Results, dict[str, int]]:
    """Losses and gradients of a pipeline whose ranks are all here, and the stage of each parameter.

    Shards of experts are put together along the experts.
    """
    torch.manual_seed(99)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, seed=SEED, **options)
    result: Any = pipe.step(*_batch(program.microbatches * pipe.mesh.replicas), outputs=True)
    shards: dict[str, list[Tensor]] = {}
    stages: dict[str, int] = {}
    for place in pipe.places:
        for stage in pipe.held(place):
            for name, parameter in stage.module.named_parameters():
                if parameter.grad is not None and (place.replica == 0 or ".experts." in name):
                    shards.setdefault(name, []).append(parameter.grad)
                    stages[name] = stage.index
    sharded = pipe.mesh.replicas > 1
    grads = {name: torch.cat(parts) if sharded and ".experts." in name else parts[0] for name, parts in shards.items()}
    pipe.close()
    return {"losses": result.losses, **grads}, stages


def _compared(mine: Results, parts: Sequence[Results], program: Program, stages: Mapping[str, int]) -> dict[str, Any]:
    bitwise = _same(mine, _in_order(parts, program, stages))
    return {"against": "autograd", "bitwise": bitwise, "difference": _difference(mine, _ascending(parts))}


def _same(mine: Results, expected: Results) -> bool:
    return mine.keys() == expected.keys() and all(torch.equal(mine[name], expected[name]) for name in expected)


def _difference(mine: Results, expected: Results) -> float:
    assert mine.keys() == expected.keys()
    return max(float((mine[name] - expected[name]).abs().max()) for name in expected)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


_DRAWS: Mapping[str, nn.Module] = {
    "module": nn.Dropout(0.1),
    "function": _Function(lambda x: functional.dropout(x, 0.1)),
    "operation": _Function(torch.rand_like),
}


def _cost(module: nn.Module, calls: int = 100, runs: int = 100) -> float:
    """What a call of ``module`` costs more by name, in us: the least of alternating runs."""
    x = torch.ones(4)
    numbering = Numbering(module, 0, x.device, {})

    def spent() -> float:
        begin = process_time()
        for _ in range(calls):
            module(x)
        return (process_time() - begin) / calls * 1e6

    plain, named = [], []
    for _ in range(runs):
        plain.append(spent())
        with by_name(), numbering.forward(0):
            named.append(spent())
    return round(min(named) - min(plain), 2)
