"""Trains a model with tied embeddings on four processes, and compares all copies, a reference by role, and autograd.

A small GPT in float64, 10 steps of AdamW with clipping, for each schedule of `CASES`. A case has:

    copies            how many ranks hold a copy of the tied weight
    copies_equal      whether the copies have the same bits at the end
    reference_equal   whether all parameters and losses have the bits of the reference: two parameters, one for each
                      use, whose gradients are added by hand after a serial step, clipped by the pipeline's norm, and
                      updated alike
    norms_equal       whether all ranks have the same norms. norm_error: the largest relative difference to the norm of
                      the reference's gradients
    optimizer_equal   the same of both moments of AdamW
    to_autograd       the largest difference of a parameter to autograd on one tied tensor, with torch's own clipping
    clipped           how many of the steps were clipped

A schedule with both uses on one rank has one copy. Its reference is the serial reference of the tied model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedc
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.build.tied import bits_of
from schedc_runtime.testing import pool

CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("1f1b", {"P": 4, "M": 4}),
    ("zbh1", {"P": 4, "M": 6}),
    ("interleaved_1f1b", {"P": 4, "M": 4}),
    ("dualpipev", {"P": 4, "M": 8}),
    ("zbv", {"P": 4, "M": 7}),
    ("dualpipe", {"P": 4, "M": 8}),
)
STEPS, RATE, LARGEST_NORM, VOCABULARY, LENGTH = 10, 1e-3, 0.5, 48, 8
FIRST, LAST = "token_embedding.weight", "head.weight"


def measure() -> dict[str, Any]:
    """All cases, each as the module describes."""
    torch.set_num_threads(1)
    everyone = pool(4).run("trainers.tied:train_all", timeout=600)
    cases = [_case(name, sizes, [ranks[i] for ranks in everyone]) for i, (name, sizes) in enumerate(CASES)]
    keys = ("copies_equal", "reference_equal", "optimizer_equal", "norms_equal")
    together = {key: all(case[key] for case in cases) for key in keys}
    return {**together, "to_autograd": max(case["to_autograd"] for case in cases), "cases": cases}


def _case(name: str, sizes: Mapping[str, int], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    expected = reference(schedc.compile(name, **sizes), ranks[0]["norms"])
    copies = [rank["parameters"][each] for rank in ranks for each in (FIRST, LAST) if each in rank["parameters"]]
    return {
        "case": f"{name} {sizes}",
        "processes": len(ranks),
        "copies": len(copies),
        "copies_equal": len(set(copies)) == 1,
        "reference_equal": all(_agrees(rank, expected, "parameters") for rank in ranks)
        and all(rank["losses"] == expected["losses"] for rank in ranks),
        "norms_equal": all(rank["norms"] == ranks[0]["norms"] for rank in ranks),
        "norm_error": max(abs(a - b) / b for a, b in zip(ranks[0]["norms"], expected["norms"], strict=True)),
        "optimizer_equal": all(_agrees(rank, expected, "moments") for rank in ranks),
        "to_autograd": max(rank["to_autograd"] for rank in ranks),
        "clipped": sum(norm > LARGEST_NORM for norm in expected["norms"]),
    }


def _agrees(rank: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> bool:
    """Whether a rank's digests are those of the reference; every rank has some."""
    return bool(rank[what]) and all(expected[what][name] == digest for name, digest in rank[what].items())


def train_all(rank: int, world_size: int) -> list[dict[str, Any]]:
    """What each rank runs: every case, one after the other."""
    return [train(schedc.compile(name, **sizes)) for name, sizes in CASES]


def train(program: Program) -> dict[str, Any]:
    """A case on the process of a rank: digests of what it holds, losses, norms, and the distance to autograd."""
    model, twin = tied_model(), tied_model()
    pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=60)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(pipe.step(*batch_of(program, step))))
        norms.append(float(pipe.clip_grad_norm_(LARGEST_NORM)))
        optimizer.step()
    autograd = [by_autograd(twin, program).state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(autograd)
    held = dict(pipe.named_parameters())
    result = {
        **_digests(held, optimizer),
        "losses": losses,
        "norms": norms,
        "to_autograd": max(float((p - (autograd[0] or {})[name]).detach().abs().max()) for name, p in held.items()),
    }
    pipe.close()
    return result


def reference(program: Program, clipped_by: Sequence[float]) -> dict[str, Any]:
    """The run in this process: serial steps, the gradients of both uses added by hand, both uses updated alike.

    clipped_by: [STEPS] the norms by which gradients are clipped.
    """
    model = tied_model()
    apart = set(program.placement.rank_of_stage[:, 0]) != set(program.placement.rank_of_stage[:, -1])
    if apart:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parts = partition(model, program.stages, placement=program.placement)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        batch, targets = batch_of(program, step)
        microbatches = [((x,), {}) for x in batch.chunk(program.microbatches)]
        expected = reference_step(parts, program, microbatches, targets.chunk(program.microbatches), next_token_loss)
        grads = dict(expected.grads)
        if apart:
            grads[FIRST] = grads[LAST] = grads[FIRST] + grads[LAST]
        for name, parameter in named.items():
            parameter.grad = grads[name].clone()
        losses.append(float(expected.loss))
        counted = [parameter.grad for name, parameter in named.items() if not (apart and name == LAST)]
        norms.append(norm_of(counted))
        clip(model.parameters(), clipped_by[step])
        optimizer.step()
    digests = _digests(named, optimizer)
    if not apart:  # a rank of `dualpipe` that holds only the last stage's name has the same parameter
        digests["parameters"][LAST] = digests["parameters"][FIRST]
    return {**digests, "losses": losses, "norms": norms}


def by_autograd(model: GPT, program: Program) -> GPT:
    """The same steps by autograd on the whole model, whose table is one tensor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch, targets = batch_of(program, step)
        pieces = zip(batch.chunk(program.microbatches), targets.chunk(program.microbatches), strict=True)
        torch.stack([next_token_loss(model(x), y) for x, y in pieces]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
    return model


def norm_of(counted: Iterable[Tensor | None]) -> float:
    """The norm of the gradients that count."""
    norms = torch._foreach_norm([grad for grad in counted if grad is not None], 2.0, dtype=torch.float64)
    return math.sqrt(math.fsum(float(each) ** 2 for each in norms))


def clip(parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Scale the gradients to `LARGEST_NORM`, if their ``norm`` is larger."""
    for parameter in parameters:
        if parameter.grad is not None and norm > LARGEST_NORM:
            parameter.grad.mul_(LARGEST_NORM / (norm + 1e-6))


def _digests(named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    moments = {
        f"{name} {key}": bits_of(optimizer.state[parameter][key])
        for name, parameter in named.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    return {"parameters": {name: bits_of(p) for name, p in named.items()}, "moments": moments}


def tied_model() -> GPT:
    """The same weights wherever it is made."""
    torch.manual_seed(0)
    return GPT(GPTConfig(width=16, heads=2, blocks=8, vocab=VOCABULARY, tied=True)).double()


def batch_of(program: Program, step: int) -> tuple[Tensor, Tensor]:
    """[2 M, LENGTH] tokens and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (2, 2 * program.microbatches, LENGTH), generator=generator)
    return ids[0], ids[1]
