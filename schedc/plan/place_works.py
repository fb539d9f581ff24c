"""Places the works that a plan asks for: which activations leave, when, and what the step then takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Floats
from schedc.ir.ops import OpKind
from schedc.ir.plan import Host, Plan
from schedc.ir.scopes import line_per_stage
from schedc.ir.works import WorkLane
from schedc.plan.directives.base import Directives
from schedc.plan.held_memory import HeldMemory
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.dependencies import Dependencies
from schedc.step.memory import RankBytes
from schedc.step.placed_works import PlacedWorks
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks
from schedc.step.works.offload_search import OffloadSearch
from schedc.step.works.place_offload import ByStage, LaneSpeeds, Stays, stays_of
from schedc.units import amount, plain, shown

_KEPT_FREE = (0, 1, 2, 3)
"""Places, each of the largest activation of a rank, that `offload auto` tries to keep for what is on its way."""

_SAME = 1e-9
"""Steps that differ by less, as a part of them, take as long as each other."""

_ON_THE_WAY = 2
"""Microbatches of a stage that may be on the way, beside the number that a line keeps: one in each direction."""

_MILLISECONDS = 1000.0
"""Times of costs are in milliseconds where the memory of a plan is in bytes."""


@dataclass(frozen=True, eq=False)
class Offloading(StepWorks):
    """The works of a plan with their times.

    kept_free: places that `offload auto` kept for what is on its way; None where the lines say what leaves.
    """

    kept_free: int | None

    @property
    def uncapped(self) -> float:
        """The makespan of the same order where nothing leaves."""
        return self.cells.makespan

    @property
    def makespan(self) -> float:
        return float(self.lanes.end.max(initial=0.0))

    def under(self, dependencies: Dependencies, costs: Costs) -> Offloading:
        """The same works, whose cells take the times of these costs."""
        return replace(self, cells=CellTimes.of(dependencies, costs.resolved(dependencies.schedule.stages)))


@dataclass(frozen=True, eq=False)
class _Step:
    """A step without works: cells, memory, and lanes.

    held: [cells] the most inside each.
    """

    cells: CellTimes
    costs: StageCosts
    host: Host
    held: Floats

    @property
    def dependencies(self) -> Dependencies:
        return self.cells.dependencies

    @property
    def speeds(self) -> LaneSpeeds:
        return LaneSpeeds(self.cells.start, self.cells.end, *times_of(self.host))

    @property
    def stays(self) -> Stays:
        return stays_of(self.dependencies, self.costs.activation, self.costs.recomputed)

    def priced(self, placed: PlacedWorks, kept_free: int | None) -> Offloading:
        time = placed.works.bytes * np.array(times_of(self.host))[placed.works.lane]
        return Offloading(placed, time, self.cells, self.host.in_bytes, kept_free)


def times_of(host: Host) -> tuple[float, float]:
    """Time of a unit of memory on the lanes d2h and h2d, by the values of `WorkLane`; milliseconds for each byte."""
    factor = (_MILLISECONDS if host.in_bytes else 1.0) * host.shared
    return factor / host.out, factor / host.back


def place_offloads(directives: Directives, dependencies: Dependencies, held: HeldMemory) -> Offloading:
    """The works of a plan's `offload` lines.

    held: memory of ranks without offloads, with the activations that recomputation leaves. Raises `DiagnosticError`
    (S155) where a line moves what is read at once.
    """
    plan = held.plan
    assert plan.host is not None, "`offload` was checked beside `host`"
    memory = directives.tree.memory
    step = _Step(CellTimes.of(dependencies, held.of_stage), held.of_stage, plan.host, held.in_cells(dependencies))
    if plan.offload[0].scope != "auto":
        return step.priced(_as_written(directives, plan, step, _shares(directives, held)), None)
    assert memory is not None, "`offload auto` was checked beside the memory"
    return _chosen(step, amount(memory.limit, memory.unit) - held.standing)


def _shares(directives: Directives, held: HeldMemory) -> dict[int, float]:
    """By stage of a line: the share of activations that leaves. Raises `DiagnosticError` (S155)."""
    schedule = held.schedule
    shares: dict[int, float] = {}
    for stage, rule in line_per_stage(held.plan.offload, schedule.stages, schedule.placement).items():
        if not rule.roles:
            shares[stage] = 1.0
            continue
        share = held.activations.share_of_roles(stage, rule.roles)
        recomputed = bool(((schedule.kind == OpKind.R) & (schedule.stage == stage)).any())
        if share is None or recomputed:
            why = "has Rs" if recomputed else "has layers whose sizes are not known"
            message = f"stage {stage} {why}: how much its roles hold is not known"
            help = "name no roles, so that everything leaves" + (
                "" if recomputed else ", or say `experts` and `tokens`"
            )
            raise DiagnosticError([directives.fault("offload", "S155", message, help)])
        shares[stage] = share
    return shares


def _as_written(directives: Directives, plan: Plan, step: _Step, shares: Mapping[int, float]) -> PlacedWorks:
    """What the lines say. Each stage is judged alone. shares: of activations that leave, by stage."""
    schedule = step.dependencies.schedule
    rules = line_per_stage(plan.offload, schedule.stages, schedule.placement)
    named = {number for rule in plan.offload if rule.scope == "stage" for number in rule.numbers}
    stays = step.stays
    for stage in sorted(named & set(stays.stage.tolist())):
        own = stays.only(stays.stage == stage)
        if (own.used - own.made < 2).all():
            raise DiagnosticError([_read_at_once(directives, stage, int(own.microbatch[0]))])
    leaving = [stage for stage in rules if shares[stage] > 0]
    moved = np.array([shares.get(stage, 0.0) for stage in range(schedule.stages)])
    stays = replace(stays, bytes=stays.bytes * moved[stays.stage]).only(np.isin(stays.stage, leaving))
    by_stage = ByStage.of(step.dependencies, stays)
    places = np.array([rules[stage].keep for stage in by_stage.stage.tolist()], np.float64)
    placed = by_stage.moves(places, _ON_THE_WAY, step.speeds).placed(step.dependencies)
    return replace(placed, in_part=frozenset(stage for stage in leaving if rules[stage].roles))


def _read_at_once(directives: Directives, stage: int, microbatch: int) -> Diagnostic:
    message = f"stage {stage} reads its forward's activations at once: nothing can leave"
    note = f"{stage}F{microbatch} and its backward follow each other on their rank"
    help = "offload stages that hold several microbatches: those of the first ranks"
    return directives.fault("offload", "S155", message, help, notes=(note,))


def _chosen(step: _Step, room: Floats) -> Offloading:
    """The shortest step of those that keep some places free; fewer places, and so fewer moves, where it is the same.

    room: [P] memory for activations.
    """
    search = OffloadSearch(step.cells, step.stays, step.speeds, step.held, room)
    as_short = _shortest(step, search, step.cells.makespan * (1 + 4 * _SAME))
    chosen = as_short if as_short is not None else _shortest(step, search, np.inf)
    assert chosen is not None, "a try without a limit has moves"
    return chosen


def _shortest(step: _Step, search: OffloadSearch, limit: float) -> Offloading | None:
    """The choice among the tries whose step is not proved to take longer than ``limit``; the others are left out.

    None where some are left out, and no step is found that takes as long as without moves. Only that step is surely
    shorter than the steps left out.
    """
    best: Offloading | None = None
    shortest, left_out, uncapped = np.inf, False, step.cells.makespan
    for kept_free in _KEPT_FREE:
        tried = search.kept(kept_free, limit)
        if tried is None:
            left_out = True
            continue
        offloading = step.priced(tried.moves.placed(step.dependencies), kept_free)
        makespan = uncapped if tried.unchanged else offloading.makespan
        if best is None or (tried.fits and makespan < shortest * (1 - _SAME)):
            best, shortest = offloading, makespan
        if not tried.fits or shortest <= uncapped * (1 + _SAME):
            left_out &= not tried.fits
            break
    return None if left_out else best


def check_host(
    directives: Directives, offloading: Offloading, dependencies: Dependencies, held: RankBytes | None
) -> RankBytes | None:
    """The bytes of ranks ``held``, if the host has room for the works.

    Raises `DiagnosticError` (S155) where a rank has more on the host than the plan says.
    """
    placed, host = offloading.placed, directives.plan.host
    on_host = placed.on_host(dependencies)
    if host is None or not on_host.size or on_host.max() <= host.size * (1 + 1e-12):
        return held
    gap = int(np.argmax(on_host))
    rank = int(placed.rank_of(np.array([gap]), dependencies)[0])
    cell = min(gap - rank, int(dependencies.rank_start[rank + 1]) - 1)
    op = dependencies.schedule.op(int(dependencies.first[cell]))
    write = shown if host.in_bytes else plain
    most, name = write(float(on_host[gap]), up=True), f"{op.stage}{op.kind.name}{op.microbatch}"
    message = f"rank {rank} has {most} on the host in front of {name}, and the plan says {write(host.size)}"
    help = f"say `host {most}` if there is so much, or let less leave: `keep` more, or allow more `memory`"
    raise DiagnosticError([directives.fault("host", "S155", message, help)])


def lane_facts(offloading: Offloading, dependencies: Dependencies) -> Iterator[dict[str, float | int | str]]:
    """One row for each rank and lane that works use: moves, memory that moves, time of the lane, and exposed time."""
    lanes, placed = offloading.lanes, offloading.placed
    columns = [np.ones(len(placed)), placed.works.bytes, offloading.time, lanes.exposed]
    count, size, busy, exposed = (lanes.per_rank(placed, dependencies, values) for values in columns)
    for rank, lane in np.argwhere(count > 0).tolist():
        row: dict[str, float | int | str] = {"rank": rank, "lane": WorkLane(lane).name.lower()}
        row |= {"works": int(count[rank, lane]), "bytes": float(size[rank, lane])}
        yield row | {"busy": float(busy[rank, lane]), "exposed": float(exposed[rank, lane])}
