"""Schedules at one size side by side, in microbatches of a rank: what each takes, holds, sends and needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose

import numpy as np

from schedc.cell.table import write_blocks
from schedc.compiler import legal_schedule, price
from schedc.diagnostics import Diagnostic, DiagnosticError, RequestError, did_you_mean
from schedc.elaborate.sizes import parameter_of_role
from schedc.frontier.library import SizedSchedule
from schedc.frontier.points import FrontierPoint, chunk_costs, command_of, point_of
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import Text
from schedc.plan.passes import lower
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.step.memory import measure_memory
from schedc.step.rank_counts import counts
from schedc.step.timeline import simulate
from schedc.syntax.input import AppliedPlan, Input
from schedc.syntax.tree import ScheduleTree
from schedc.units import equations

LATENCIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Latencies of a message at which steps are compared, in thirds of the work of a rank for a microbatch."""
_COUNTED = {"P": "ranks", "M": "microbatches"}
"""By the name of a size of the comparison its role, by which each schedule has it."""
_SAME = 1e-9
"""Relative difference below which two steps are equally short."""


@dataclass(frozen=True)
class ComparedSchedule:
    """A schedule at the sizes of the comparison, or why it has none.

    name: as it was given. title: the name, with its sizes beside ranks and microbatches. makespan: in the unit of the
    costs. messages: of a step, from all ranks. needs: what the schedule asks of sizes, model and runtime. by_latency:
    the makespan at each of the latencies that are compared. blocks: those of a stage, where the costs have a table of
    cells; the figures are then those from inside cells.
    """

    name: str
    title: str
    refused: str = ""
    point: FrontierPoint | None = None
    makespan: float = 0.0
    messages: int = 0
    needs: tuple[str, ...] = ()
    by_latency: tuple[float, ...] = ()
    blocks: tuple[str, ...] = ()


def compare_schedules(names: Sequence[str | Text], sizes: Mapping[str, int], costs: Costs) -> list[ComparedSchedule]:
    """All schedules at the same ranks and microbatches. costs: of a microbatch on a rank.

    sizes: ``P`` and ``M`` are the ranks and the microbatches of each, and other sizes go to schedules that have them.
    Raises `RequestError` (S111) for a size that none has.
    """
    inputs = {_label(name): open_input(name) for name in names}
    known = {name for tree in inputs.values() for name in _free(tree)} | set(_COUNTED)
    if unknown := sorted(set(sizes) - known):
        help = did_you_mean(unknown[0], known)
        raise RequestError([Diagnostic("S111", f"no schedule has a size `{unknown[0]}`", help=help)])
    return [_compared(name, tree, sizes, costs) for name, tree in inputs.items()]


def _label(name: str | Text) -> str:
    """What the command line names a schedule by: ``-`` for standard input, and the path of another pipe."""
    if isinstance(name, str):
        return name
    place = "-" if name.source.name == "<stdin>" else name.source.name
    return f"{place}:{name.wanted}" if name.wanted else place


def compared_latencies(costs: Costs) -> tuple[float, ...]:
    """[n] ascending, in the unit of the costs: `LATENCIES` times a third of the work, and the latency of the costs.

    With a table of cells, the latency of the costs alone.
    """
    if costs.cell is not None:
        return (costs.p2p,)
    work = sum(float(each) for each in (costs.F, costs.I, costs.W) if isinstance(each, float | int))
    tried = [each * work / 3 for each in LATENCIES]
    return tuple(sorted([*(each for each in tried if not isclose(each, costs.p2p)), costs.p2p]))


def _compared(name: str, tree: Input, sizes: Mapping[str, int], costs: Costs) -> ComparedSchedule:
    if reason := _no_family(tree):
        return ComparedSchedule(name, name, reason)
    assert isinstance(tree, ScheduleTree)
    roles = {parameter_of_role(tree, role).name: sizes[name] for name, role in _COUNTED.items()}
    own = {name: sizes[name] for name in _free(tree) if name in sizes} | roles
    measured = _measured if costs.cell is None else _measured_inside
    try:
        return measured(name, tree, own, costs)
    except DiagnosticError as error:
        return ComparedSchedule(name, name, error.diagnostics[0].message)


def _free(tree: Input) -> list[str]:
    """The sizes that a comparison does not set by their roles."""
    return [each.name for each in tree.parameters if each.role not in _COUNTED.values()]


def _no_family(tree: Input) -> str:
    """Why an input cannot be compared in microbatches of a rank; empty for what can."""
    if isinstance(tree, AppliedPlan):
        return f"it is a plan, whose layers have costs of their own: name its schedule `{tree.schedule.name}`"
    if not isinstance(tree, ScheduleTree):
        return "it is an order of one size: give the schedule"
    if any(each.role == "segments" for each in tree.parameters):
        return "its ops are segments of a sequence, which are no microbatches"
    if other := sorted(set(_free(tree)) & set(_COUNTED)):
        return f"its size `{other[0]}` is not the {_COUNTED[other[0]]} that -D {other[0]} gives: name it otherwise"
    return ""


def _measured(name: str, tree: ScheduleTree, sizes: dict[str, int], costs: Costs) -> ComparedSchedule:
    written = legal_schedule(tree, sizes)
    v = written.stages // written.ranks
    orders: dict[float, tuple[SizedSchedule, Costs]] = {}
    for latency in compared_latencies(costs):
        own = chunk_costs(replace(costs, p2p=latency), v)
        schedule = legal_schedule(tree, sizes, own) if tree.has_policy else written
        orders[latency] = SizedSchedule(name, sizes, schedule), own
    spans = {latency: simulate(sized.schedule, own).makespan / v for latency, (sized, own) in orders.items()}
    sized, own = orders[costs.p2p]
    sent = int(counts(Dependencies.of(sized.schedule))["messages"][0])
    needs = tuple(_needs(tree, sized.schedule))
    point, title = point_of(sized, own), _title(tree, sized)
    return ComparedSchedule(name, title, "", point, spans[costs.p2p], sent, needs, tuple(spans.values()))


def _measured_inside(name: str, tree: ScheduleTree, sizes: dict[str, int], costs: Costs) -> ComparedSchedule:
    """The schedule priced from inside cells, in the unit of the table: a stage has its part of the blocks of a rank.

    The bubble is the step less what the busiest rank computes: idle time, and waits for exchanges.
    """
    assert costs.cell is not None
    written, (row,) = legal_schedule(tree, sizes), costs.cell.blocks
    v = written.stages // written.ranks
    blocks = row[: len(row) // v]
    if blocks * v != row:
        layers = f"the layers of a rank, `{write_blocks(row)}`, are not {v} equal stages"
        return ComparedSchedule(name, name, f"{layers}: give a multiple of {v} in `stages` of [cell]")
    own = replace(costs, cell=costs.cell.with_blocks([blocks]))
    step = lower(price(tree, sizes, own), "inside")
    inside, dependencies, sized = step.inside, step.dependencies, SizedSchedule(name, sizes, step.schedule)
    assert inside is not None
    makespan = inside.late_wait.makespan
    compute = np.array([of.prediction.compute for of in inside.kinds])[inside.kind]
    work = float(reduce_by_rank(np.add, compute, dependencies.rank_start).max())
    memory = float(measure_memory(step.schedule, own, dependencies).peak_memory.max()) / v
    command = command_of(sized, costs) if v == 1 else ""
    point = FrontierPoint(sized, makespan - work, memory, step.schedule.placement.pipes, command)
    sent, needs = int(counts(dependencies)["messages"][0]), tuple(_needs(tree, step.schedule))
    return ComparedSchedule(name, _title(tree, sized), "", point, makespan, sent, needs, (makespan,), blocks)


def _title(tree: ScheduleTree, sized: SizedSchedule) -> str:
    counted = {parameter_of_role(tree, role).name for role in ("ranks", "microbatches")}
    more = {name: value for name, value in sized.schedule.sizes.items() if name not in counted}
    return f"{sized.name} ({equations(more)})" if more else sized.name


def _needs(tree: ScheduleTree, schedule: Schedule) -> list[str]:
    placement, kinds = schedule.placement, {OpKind(int(kind)) for kind in np.unique(schedule.kind)}
    facts = (
        ("split backward", OpKind.W in kinds),
        ("recomputation", OpKind.R in kinds),
        (f"{placement.chunks} stages on a rank", placement.chunks > 1),
        (f"{placement.pipes} copies of the weights", placement.pipes > 1),
        ("overlapped pairs", bool((schedule.pair >= 0).any())),
    )
    return [*(word for word, holds in facts if holds), *(_required(tree, each.text) for each in tree.requires)]


def _required(tree: ScheduleTree, condition: str) -> str:
    """The condition, with the `let` lines of the names in it."""
    named: list[str] = []
    for let in reversed(tree.lets):
        if any(re.search(rf"\b{let.name}\b", text) for text in (condition, *named)):
            named.insert(0, tree.source.text_at(let.span).removeprefix("let "))
    return f"{condition} where {', '.join(named)}" if named else condition


def best_by_memory(compared: Sequence[ComparedSchedule]) -> list[tuple[float, ComparedSchedule]]:
    """From which memory on which schedule has the shortest step, by ascending memory in microbatches of a rank."""
    found: list[tuple[float, ComparedSchedule]] = []
    for each in sorted(compared, key=lambda one: (_memory(one), one.makespan)):
        if each.point and (not found or each.makespan < found[-1][1].makespan * (1 - _SAME)):
            found.append((each.point.memory, each))
    return found


def best_by_latency(compared: Sequence[ComparedSchedule], costs: Costs) -> list[tuple[float, list[ComparedSchedule]]]:
    """[latencies] each latency with the schedules whose step is the shortest there; none where nothing is compared."""
    priced = [each for each in compared if each.point]
    result = []
    for index, latency in enumerate(compared_latencies(costs)):
        least = min((each.by_latency[index] for each in priced), default=0.0)
        best = [each for each in priced if each.by_latency[index] <= least * (1 + _SAME)]
        result.append((latency, best))
    return result


def fitting(compared: Sequence[ComparedSchedule], memory: float | None) -> list[ComparedSchedule]:
    """Those that have a step here, in at most so many microbatches of a rank."""
    return [each for each in compared if each.point and (memory is None or each.point.memory <= memory * (1 + _SAME))]


def _memory(each: ComparedSchedule) -> float:
    return each.point.memory if each.point else np.inf
