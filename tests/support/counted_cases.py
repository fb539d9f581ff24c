"""Steps of other numbers of microbatches on real ranks, beside steps of pipelines that were built for them."""

from __future__ import annotations

import hashlib
from typing import Any

import schedc
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.pipeline.build import bound
from schedc_runtime.testing import pool
from support.runtime_cases import model_for, tokens

NUMBERS = range(8, 13)
SHAPES = {"1f1b": (4, 1), "zbh1": (2, 2), "interleaved_1f1b": (4, 1), "zbv": (4, 1), "dualpipev": (4, 1),
          "dualpipe": (4, 1)}  # fmt: skip
"""By schedule: ranks of a pipeline, and replicas."""


def steps_of(rank: int, world_size: int, name: str, ranks: int, numbers: list[int]) -> list[Any]:
    """Digests [numbers] of loss and gradients: of one pipeline for all, twice, and of one each; then streams bound.

    Streams are those of the first steps of the one pipeline, and of the second ones.
    """
    binds, whole = [0], bound.bind

    def counted(*arguments: Any, **keywords: Any) -> Any:
        binds[0] += 1
        return whole(*arguments, **keywords)

    def pipeline(microbatches: int) -> Pipeline:
        program = schedc.compile(name, P=ranks, M=microbatches)
        mesh = Mesh(ranks, data=world_size // ranks)
        return Pipeline(model_for(program, dropout=0.1), program, loss_fn=next_token_loss, mesh=mesh)

    def digest(pipe: Pipeline, number: int, step: int, **given: Any) -> str:
        pipe.steps = step
        loss = pipe.step(*tokens(2 * number, seed=1 + 100 * number + pipe.replica), **given)
        grads = [parameter.grad for _, parameter in sorted(pipe.named_parameters()) if parameter.grad is not None]
        told = hashlib.sha256(b"".join(each.numpy().tobytes() for each in (loss, *grads))).hexdigest()
        pipe.zero_grad()
        return told

    bound.bind = counted
    try:
        pipe = pipeline(numbers[-1])
        mine = [digest(pipe, number, step, microbatches=number) for step, number in enumerate(numbers)]
        first, binds[0] = binds[0], 0
        again = [digest(pipe, number, step, microbatches=number) for step, number in enumerate(numbers)]
        bound_again = binds[0]
        pipe.close()
        theirs = []
        for step, number in enumerate(numbers):
            other = pipeline(number)
            theirs.append(digest(other, number, step))
            other.close()
    finally:
        bound.bind = whole
    return [mine, again, theirs, first, bound_again]


def _is_possible(name: str, ranks: int, microbatches: int) -> bool:
    try:
        schedc.compile(name, P=ranks, M=microbatches)
    except schedc.DiagnosticError:
        return False
    return True


def count(schedules: tuple[str, ...] = tuple(SHAPES)) -> tuple[int, list[str], dict[str, Any]]:
    """The number of cases, what failed, and figures.

    A case is a schedule, a number of microbatches and a rank. bound: streams that the first steps have bound on a rank,
    at most. bound_again: those of second steps of the same numbers.
    """
    cases, failed, most, again = 0, list[str](), 0, 0
    for name in schedules:
        ranks, replicas = SHAPES[name]
        numbers = [each for each in NUMBERS if _is_possible(name, ranks, each)]
        told = pool(ranks * replicas).run(f"{__name__}:steps_of", timeout=300, name=name, ranks=ranks, numbers=numbers)
        for rank, (mine, second, theirs, first, bound_again) in enumerate(told):
            most, again = max(most, first), max(again, bound_again)
            cases += len(numbers)
            failed += [
                f"{name}, {number} microbatches, rank {rank}: other bits"
                for number, *digests in zip(numbers, mine, second, theirs, strict=True)
                if len(set(digests)) > 1
            ]
            failed += [f"{name}, rank {rank}: {bound_again} streams are bound again"] if bound_again else []
    return cases, failed, {"schedules": len(schedules), "numbers": list(NUMBERS), "bound": most, "bound_again": again}
