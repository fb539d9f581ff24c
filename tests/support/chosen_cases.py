"""Steps by programs that were chosen on real ranks, beside steps of pipelines that were built for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import inf
from statistics import mean, median
from time import thread_time
from typing import Any

import schedc
from schedc.step.costs.costs import Costs
from schedc.step.numba_kernels import kernels, load
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.data import ProgramChoices, StepChoice
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.pipeline.build import bound
from schedc_runtime.testing import pool
from support.row_cases import costs_of_rows
from support.runtime_cases import model_for, tokens


@dataclass(frozen=True)
class Family:
    """Schedules of one placement, ranks of a pipeline, and replicas. sizes: besides P and M."""

    names: tuple[str, ...]
    ranks: int
    replicas: int = 1
    microbatches: int = 8


FAMILIES = (
    Family(("zbv", "vhalf", "dualpipev"), 2),
    Family(("1f1b", "zbh1", "gpipe"), 2, 2),
)
TURNS = 1
"""How often each program runs."""


def programs_of(family: Family) -> list[Any]:
    return [schedc.compile(name, P=family.ranks, M=family.microbatches) for name in family.names]


def choice_of(family: Family, number: int) -> StepChoice:
    order = tuple(range(family.microbatches))
    return StepChoice(number, family.names[number], (order,), 1.0, 1.0)


def _pipeline(family: Family, programs: list[Any]) -> Pipeline:
    mesh = Mesh(family.ranks, data=family.replicas)
    first, *others = programs
    return Pipeline(model_for(first, dropout=0.1), first, loss_fn=next_token_loss, mesh=mesh, others=others)


def _told(pipe: Pipeline, family: Family, step: int, **given: Any) -> str:
    pipe.steps = step
    loss = pipe.step(*tokens(2 * family.microbatches, seed=1 + 100 * step + pipe.replica), trace=True, **given)
    grads = [parameter.grad for _, parameter in sorted(pipe.named_parameters()) if parameter.grad is not None]
    pipe_bits = hashlib.sha256(b"".join(each.numpy().tobytes() for each in (loss, *grads))).hexdigest()
    pipe.zero_grad()
    return f"{pipe._runner.traced.name} {pipe_bits}"  # schedules may well have the same bits


def steps_of(rank: int, world_size: int, number: int) -> list[Any]:
    """Programs and digests of a family's steps, of one pipeline and of one for each program.

    Then the streams that the first step has bound, and the later ones.
    """
    family, binds, whole = FAMILIES[number], [0], bound.bind

    def counted(*arguments: Any, **keywords: Any) -> Any:
        binds[0] += 1
        return whole(*arguments, **keywords)

    turns = [*range(len(family.names))] * TURNS
    bound.bind = counted
    try:
        pipe = _pipeline(family, programs_of(family))
        mine = [_told(pipe, family, 0, choice=choice_of(family, 1))]
        first, binds[0] = binds[0], 0
        mine += [_told(pipe, family, step, choice=choice_of(family, n)) for step, n in enumerate(turns, 1)]
        later = binds[0]
        pipe.close()
    finally:
        bound.bind = whole
    theirs: dict[int, str] = {}
    for number in range(len(family.names)):
        other = _pipeline(family, [programs_of(family)[number]])
        steps = [step for step, n in enumerate([1, *turns]) if n == number]
        theirs |= {step: _told(other, family, step) for step in steps}
        other.close()
    return [mine, [theirs[step] for step in range(len(mine))], first, later]


def disagreements(rank: int, world_size: int, number: int) -> list[str]:
    """What each rank raises as rank 1 asks for another program or order, or was built with others.

    Then programs and digests of the steps before and after these disagreements.
    """
    family = FAMILIES[number]
    programs = programs_of(family)
    pipe, said, right = _pipeline(family, programs), list[str](), choice_of(family, 1)
    batch, before = tokens(2 * family.microbatches), _told(pipe, family, 0, choice=right)
    order = tuple(reversed(range(family.microbatches)))
    for wrong in (choice_of(family, 2), replace(right, orders=(order,)), choice_of(family, 0), None):
        try:
            pipe.step(*batch, choice=wrong if rank == 1 else right)
        except RuntimeFault as error:
            said.append(str(error))
    try:
        _pipeline(family, programs[: 2 + rank])
    except RuntimeFault as error:
        said.append(str(error))
    pipe.zero_grad()
    said += [before, _told(pipe, family, 0, choice=right)]
    pipe.close()
    return said


def chosen(numbers: tuple[int, ...] = tuple(range(len(FAMILIES)))) -> tuple[int, list[str], dict[str, Any]]:
    """The number of cases, what failed, and figures. A case is a step of a rank."""
    cases, failed, most, later = 0, list[str](), 0, 0
    for number in numbers:
        family = FAMILIES[number]
        told = pool(family.ranks * family.replicas).run(f"{__name__}:steps_of", timeout=300, number=number)
        for rank, (mine, theirs, first, after) in enumerate(told):
            most, later = max(most, first), max(later, after)
            cases += len(mine)
            failed += [
                f"{family.names}, step {step}, rank {rank}: other bits"
                for step, (one, other) in enumerate(zip(mine, theirs, strict=True))
                if one != other
            ]
            failed += [f"{family.names}, rank {rank}: {after} streams are bound later"] if after else []
    return cases, failed, {"bound": most, "bound_later": later}


LIMIT = 10.0
"""Milliseconds that a choice may compute."""
DRAWN = (("dualpipev", "zbv", "vhalf", "vmin"), ("1f1b", "zbh1", "eager_1f1b", "zbh2"))
"""Schedules of one placement, the one of a pipeline without a choice first."""


def _choices(names: tuple[str, ...], costs: Costs, draws: int) -> list[tuple[float, float, float]]:
    """[draws] milliseconds of a choice for 8 ranks and 32 microbatches, the step over its floor, and over the first."""
    choices = ProgramChoices.of([schedc.compile(name, P=8, M=32) for name in names], costs)
    alone, found = ProgramChoices.of([schedc.compile(names[0], P=8, M=32)], costs), []
    for seed in range(draws):
        rows = costs_of_rows(("bimodal", "log-normal")[seed % 2], 32, seed)[None]
        began = thread_time()
        chosen = choices.choose(rows, [0])
        found.append((1e3 * (thread_time() - began), chosen.makespan / chosen.floor,
                      chosen.makespan / alone.choose(rows, [0]).makespan))  # fmt: skip
    return found


def choose(draws: int = 20) -> tuple[int, list[str], dict[str, Any]]:
    """The number of cases, what failed, and figures. A case is a choice, or a step on a rank."""
    cases, failed, figures = chosen()
    both = {}
    for compiled in (False, True):
        if compiled:
            load()
            kernels(inf)
        both[compiled] = [each for names in DRAWN for each in _choices(names, Costs(p2p=0.05), draws)]
    times = {key: median(each[0] for each in found) for key, found in both.items()}
    failed += [f"a choice computes for {each:.1f} ms" for each in times.values() if each > LIMIT]
    failed += ["a step is below its floor" for found in both.values() for each in found if each[1] < 1 - 1e-9]
    _, floors, gains = (mean(each) for each in zip(*both[True], strict=True))
    told = {"milliseconds": times[True], "first": times[False], "floor": floors, "gained": gains}
    return cases + sum(map(len, both.values())), failed, {**told, **figures}
