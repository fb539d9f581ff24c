"""Balances layers exactly: the least load of the largest rank, and with it the least load of the largest stage.

Loads are sums of whole parts, so only finitely many can be the largest. Bisection finds the least of them for which
`exact.fits`, first for ranks, then for stages. The next smaller load does not fit: this proves the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import lcm

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.placement import Placement
from schedc.plan.layout.costs import LayerCosts, PerKind
from schedc.plan.layout.even import places_per_stage
from schedc.plan.layout.exact import Counts, FittingProblem, Limits, fits, place
from schedc.plan.layout.parts import LARGEST, WORK, Layout, Model, ModelPart, PartKind, refusal

_EXACT = 1 << 50
"""Larger integers than this are rounded, to 12 digits: costs are floats, and no more exact."""


@dataclass(frozen=True)
class Balanced:
    """A layout of which none is better.

    largest_rank, largest_stage: time of one microbatch on the largest rank and in the largest stage, in the costs'
    unit. refuted_rank: the next smaller sum of layers; no layout keeps every rank within it. refuted_stage: the next
    smaller sum of layers; no layout with this largest rank keeps every stage within it. Both are None where no smaller
    sum exists. within: limit of every stage under which the ranks were balanced; None for no limit (see `frontier`).
    """

    layout: Layout
    largest_rank: float
    largest_stage: float
    refuted_rank: float | None
    refuted_stage: float | None
    within: float | None = None


def balance(
    model: Model,
    placement: Placement,
    costs: LayerCosts | None = None,
    *,
    pad: int | None = None,
    memory: float | None = None,
    in_flight: Sequence[int] | None = None,
) -> Balanced:
    """Places a model's layers on the stages of a placement, in order, with the least load of the largest rank.

    The load of a rank is the sum of its chunks. Among the best layouts, one with the least largest stage is taken.
    Embedding and head are in the first and the last stage. With predictions, the head is alone in the last stage. The
    heads of a model with a loss per output are in the last stages, with layers beside the first of them alone.

    pad: number of paddings that fill the stages up to equally many places; no stage has more layers than places.
    memory: the most that a rank may hold of parameters and activations, in the unit of the costs. in_flight: [stages]
    microbatches that each stage holds at its peak (`schedc.plan.layout.compare.peak_in_flight`). The peaks of a rank's
    chunks are added, as if they came at one time.

    Raises `DiagnosticError`: S143 where the model does not fit the stages, S406 where no layout keeps within memory.
    """
    return next(frontier(model, placement, costs, pad=pad, memory=memory, in_flight=in_flight))


def frontier(
    model: Model,
    placement: Placement,
    costs: LayerCosts | None = None,
    *,
    pad: int | None = None,
    memory: float | None = None,
    in_flight: Sequence[int] | None = None,
) -> Iterator[Balanced]:
    """`balance`'s layout, then layouts with smaller and smaller stages, each with the least largest rank they allow.

    No layout is better than all of these in both its largest rank and its largest stage. The load of ranks alone does
    not make a step short: all others wait for a stage that is much larger than they are.
    """
    costs = costs or LayerCosts()
    problem, unit, memory_unit = _problem(model, placement, costs, pad, in_flight)
    roof = _roof(problem)
    if memory is not None:
        roof = roof._replace(memory=min(roof.memory, int(Fraction(repr(float(memory))) * memory_unit)))
    if not fits(problem, roof):
        raise _does_not_fit(model, placement, costs, problem, memory, memory_unit, in_flight)
    width, within = problem.width if pad is not None else 0, None
    while fits(problem, roof):
        rank, below_rank = _least(_rank_loads(problem), partial(_within, problem, roof, "rank"))
        roof = roof._replace(rank=rank)
        stages = _stage_loads(problem, min(rank, roof.stage))
        stage, below_stage = _least(stages, partial(_within, problem, roof, "stage"))
        placed = place(problem, roof._replace(stage=stage))
        assert placed is not None
        in_unit = [None if load is None else load / unit for load in (below_rank, below_stage, within)]
        yield Balanced(_layout(model, placed, width), rank / unit, stage / unit, *in_unit)
        if below_stage is None:
            return
        within, roof = below_stage, roof._replace(rank=_roof(problem).rank, stage=below_stage)


def _within(problem: FittingProblem, limits: Limits, which: str, load: int) -> bool:
    """Whether layers fit when one of the limits is ``load``."""
    return fits(problem, limits._replace(**{which: load}))


def groups_of(placement: Placement) -> dict[tuple[int, ...], list[int]]:
    """The stages of a rank -> the ranks with these stages. Raises `DiagnosticError` (S143) where two sets overlap."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(placement.ranks):
        stages = np.unique(np.nonzero(placement.rank_of_stage == rank)[1])
        groups.setdefault(tuple(int(stage) for stage in stages), []).append(rank)
    if sum(map(len, groups)) != placement.stages:
        raise refusal(
            "the two pipes of this placement pair each stage with several others",
            "layers are balanced where ranks share all of their stages or none",
        )
    return groups


def _problem(
    model: Model, placement: Placement, costs: LayerCosts, pad: int | None, in_flight: Sequence[int] | None
) -> tuple[FittingProblem, int, int]:
    """The problem in integers, and the integers per unit of time and per unit of memory."""
    stages, last = placement.stages, placement.stages - 1
    if stages < (needed := max(model.losses, 1 + (model.mtp > 0))):
        what = "predictions and head" if model.losses == 1 else f"{model.losses} losses"
        raise refusal(
            f"{what} in {'one stage' if stages == 1 else f'{stages} stages'}",
            f"this model has at least {needed} stages",
        )
    runs, kinds = _runs(model)
    peak = [0] * stages if in_flight is None else [int(number) for number in in_flight]
    if len(peak) != stages:
        raise refusal(f"{len(peak)} peaks for {stages} stages", "one per stage")
    shared = _with_shared_head(costs, model.losses)
    time, unit = _integers(shared.time)
    weights, memory_unit = _integers([*costs.parameters_of(model), *shared.activations])
    parameters, activations = PerKind(*weights[: len(WORK)]), PerKind(*weights[len(WORK) :])
    times = PerKind(*time)

    def holds(kind: PartKind, stage: int) -> int:
        return int(getattr(parameters, kind)) + peak[stage] * int(getattr(activations, kind))

    heads = model.heads(stages)
    ends = [[PartKind.EMBEDDING] * (stage == 0) + [PartKind.HEAD] * (stage in heads) for stage in range(stages)]
    problem = FittingProblem(
        groups=tuple(groups_of(placement)),
        runs=runs,
        time=_three(int(getattr(times, kind)) for kind in kinds),
        fixed_time=tuple(sum(int(getattr(times, kind)) for kind in here) for here in ends),
        fixed_memory=tuple(sum(holds(kind, stage) for kind in here) for stage, here in enumerate(ends)),
        memory=tuple(_three(holds(kind, stage) for kind in kinds) for stage in range(stages)),
        weight=tuple(peak),
        width=LARGEST if pad is None else places_per_stage(model, stages, pad),
        last=last if not model.mtp else last - 1 if model.losses == 1 else min(heads),
    )
    return problem, unit, memory_unit


def _with_shared_head(costs: LayerCosts, losses: int) -> LayerCosts:
    """The costs of which each of several heads takes its share of time and activations."""
    if losses == 1:
        return costs
    time, activations = (each._replace(head=each.head / losses) for each in (costs.time, costs.activations))
    return replace(costs, time=time, activations=activations)


def _runs(model: Model) -> tuple[Counts, tuple[PartKind, PartKind, PartKind]]:
    """The number of parts of each run, and its kind. Layers of a single kind are run 2."""
    dense = model.layers if model.dense is None else model.dense
    if 0 < dense < model.layers:
        return (dense, model.layers - dense, model.mtp), (PartKind.DENSE, PartKind.MOE, PartKind.MTP)
    return (0, model.layers, model.mtp), (PartKind.DENSE, PartKind.DENSE if dense else PartKind.MOE, PartKind.MTP)


def _three(values: Iterable[int]) -> Counts:
    first, second, third = values
    return first, second, third


def _integers(values: Sequence[float]) -> tuple[list[int], int]:
    """The values as integers, exact for their decimals, and the integer that 1 becomes."""
    exact = [Fraction(repr(float(value))) for value in values]
    unit = lcm(*(value.denominator for value in exact))
    largest = max(exact) * unit
    if largest > _EXACT:
        unit = max(1, int(unit * _EXACT / largest))
    return [round(value * unit) for value in exact], unit


def _roof(problem: FittingProblem) -> Limits:
    """Limits that every layout keeps."""
    runs = range(3)
    time = sum(problem.fixed_time) + sum(problem.runs[run] * problem.time[run] for run in runs)
    memory = sum(problem.fixed_memory)
    memory += sum(problem.runs[run] * max(of_stage[run] for of_stage in problem.memory) for run in runs)
    return Limits(time, time, memory)


def _rank_loads(problem: FittingProblem) -> npt.NDArray[np.int64]:
    """Every load that the largest rank may have, ascending: sums of whole parts from the mean on."""
    fixed = [sum(problem.fixed_time[stage] for stage in group) for group in problem.groups]
    return _sums(problem, fixed, max(-(-_roof(problem).rank // len(fixed)), *fixed))


def _stage_loads(problem: FittingProblem, rank: int) -> npt.NDArray[np.int64]:
    """Every load that the largest stage may have, ascending, while no rank has more than ``rank``."""
    fixed = list(problem.fixed_time)
    loads = _sums(problem, fixed, max(-(-_roof(problem).rank // len(fixed)), *fixed))
    return loads[loads <= rank]


def _sums(problem: FittingProblem, fixed: Sequence[int], least: int) -> npt.NDArray[np.int64]:
    loads = np.unique(np.array(fixed, np.int64))
    for parts, time in zip(problem.runs, problem.time, strict=True):
        loads = np.unique(loads[:, None] + np.arange(parts + 1, dtype=np.int64) * time)
    return loads[loads >= least]


def _least(loads: npt.NDArray[np.int64], possible: Callable[[int], bool]) -> tuple[int, int | None]:
    """The least possible load of ``loads`` (ascending), and the load before it; the last is known to be possible.

    It is seldom far from the first, so the search begins there, in steps that double.
    """
    low, high, step = 0, 0, 1
    while high < len(loads) - 1 and not possible(int(loads[high])):
        low, high, step = high + 1, min(high + step, len(loads) - 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(int(loads[middle])) else (middle + 1, high)
    return int(loads[low]), int(loads[low - 1]) if low else None


def _layout(model: Model, placed: Sequence[Counts], width: int) -> Layout:
    """The layout of the counts; paddings fill each stage up to ``width`` places."""
    layers, predictions, heads = iter(model.decoder), iter(model.predictions), model.heads(len(placed))
    stages = []
    for stage, (first, second, third) in enumerate(placed):
        parts = [*model.entry] if stage == 0 else []
        parts += [next(layers) for _ in range(first + second)]
        parts += [ModelPart(PartKind.NOOP)] * (width - first - second)
        parts += [next(predictions) for _ in range(third)]
        stages.append((*parts, heads[stage]) if stage in heads else tuple(parts))
    return Layout(tuple(stages))


def _does_not_fit(
    model: Model,
    placement: Placement,
    costs: LayerCosts,
    problem: FittingProblem,
    memory: float | None,
    memory_unit: int,
    in_flight: Sequence[int] | None,
) -> DiagnosticError:
    """The error for a model without a layout: too few places, or too little memory, with the least that suffices."""
    roof = _roof(problem)
    if not fits(problem, roof):
        free = problem.last + 1
        enough = -(-model.layers // free) * placement.stages - model.layers
        return refusal(
            f"{model.layers} layers do not go into the first {free} stages, {problem.width} in each",
            f"heads are alone where there are predictions: {enough} paddings make enough places, or leave them out",
        )
    low, high = 0, roof.memory
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(problem, roof._replace(memory=middle)) else (middle + 1, high)
    placed = place(problem, roof._replace(memory=low))
    assert placed is not None
    worst = max(range(len(problem.groups)), key=lambda group: problem.held(group, placed))
    rank = groups_of(placement)[problem.groups[worst]][0]
    layout = _layout(model, placed, 0)
    largest = contributors(layout, problem.groups[worst], costs, in_flight or [0] * placement.stages)[:3]
    least = low / memory_unit
    return DiagnosticError([
        Diagnostic(
            "S406",
            f"no layout keeps every rank within {memory:g}: rank {rank} holds {least:g} in the smallest layout",
            notes=tuple(f"rank {rank} holds {amount:g} for {what}" for amount, what in largest),
            help=f"allow {least:g}, use a schedule that holds fewer microbatches, or more ranks",
        )
    ])  # fmt: skip


def contributors(
    layout: Layout, stages: Iterable[int], costs: LayerCosts, in_flight: Sequence[int]
) -> list[tuple[float, str]]:
    """(memory, purpose) of everything that a rank with these stages holds, largest first.

    in_flight: [stages] microbatches. Memory is in the unit of the costs.
    """
    items = []
    parameters = costs.parameters_in(layout)
    for stage in stages:
        for column, kind in enumerate(WORK):
            name = f"{_counted(int(layout.counts[stage, column]), _NAMES[kind])} of stage {stage}"
            items.append((float(parameters[stage, column]), f"the parameters of {name}"))
            held = float(layout.shares[stage, column]) * in_flight[stage] * getattr(costs.activations, kind)
            items.append((held, f"the activations of {_counted(in_flight[stage], 'microbatch', 'es')} in {name}"))
    return sorted((item for item in items if item[0]), key=lambda item: -item[0])


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


_NAMES = {
    PartKind.EMBEDDING: "embedding",
    PartKind.DENSE: "dense layer",
    PartKind.MOE: "MoE layer",
    PartKind.MTP: "multi-token prediction",
    PartKind.HEAD: "head",
}
