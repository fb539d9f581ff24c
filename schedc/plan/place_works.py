"""Places the works that a plan asks for: which activations leave, when, and what the step then takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.placed_works import LaneTimes, PlacedWork, PlacedWorks, run_with_works
from schedc.analysis.timeline import durations, run_durations
from schedc.attachments.units import amount, plain, shown
from schedc.attachments.values import Attachments, Host
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats, bincount
from schedc.ir.works import WorkLane
from schedc.layout.costs import LayerCosts
from schedc.layout.parts import Layout
from schedc.passes.place_offload import Move, RankTimes, Stay, choose_moves, give_time, stays_of, works_of
from schedc.plan.directives.base import Directives
from schedc.plan.directives.offload import kept_per_stage
from schedc.plan.peak_memory import extra_memory, held_inside, standing_memory

_KEPT_FREE = (0, 1, 2, 3)
"""Places, each of the largest activation of a rank, that `offload auto` tries to keep for what is on its way."""

_ON_THE_WAY = 2
"""Microbatches of a stage that may be on their way beside those that a line keeps: one in each direction."""

_MILLISECONDS = 1000.0
"""Times of costs are in milliseconds where the memory of a plan is in bytes."""


@dataclass(frozen=True, eq=False)
class Offloading:
    """The works of a plan with their times.

    time: [works] on the lane. uncapped: the makespan of the same order where nothing leaves. kept_free: places that
    `offload auto` kept for what is on its way; None where the lines say what leaves.
    """

    placed: PlacedWorks
    time: Floats
    lanes: LaneTimes
    uncapped: float
    kept_free: int | None

    @property
    def makespan(self) -> float:
        return float(self.lanes.end.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class _Step:
    """A step without works: its cells, what they hold, and what lanes take.

    held: [cells] the most inside each; start, end: [cells]; duration: [cells].
    """

    dependencies: Dependencies
    costs: StageCosts
    host: Host
    held: Floats
    duration: Floats
    start: Floats
    end: Floats

    def stays(self, rank: int) -> list[Stay]:
        return stays_of(self.dependencies, rank, self.costs.activation, self.costs.recomputed)

    def cells(self, rank: int) -> slice:
        return slice(int(self.dependencies.rank_start[rank]), int(self.dependencies.rank_start[rank + 1]))

    def times(self, rank: int) -> RankTimes:
        out, back = times_of(self.host)
        return RankTimes(self.start[self.cells(rank)], self.end[self.cells(rank)], out, back)

    def priced(self, placed: PlacedWorks, kept_free: int | None) -> Offloading:
        time = placed.works.bytes * np.array(times_of(self.host))[placed.works.lane]
        lanes = run_with_works(self.dependencies, self.duration, self.costs.p2p, placed, time)
        return Offloading(placed, time, lanes, float(self.end.max(initial=0.0)), kept_free)


def times_of(host: Host) -> tuple[float, float]:
    """Time of a unit of memory on the lanes d2h and h2d, by the values of `WorkLane`; milliseconds for each byte."""
    factor = _MILLISECONDS if host.in_bytes else 1.0
    return factor / host.out, factor / host.back


def place_offloads(
    directives: Directives,
    plan: Attachments,
    layout: Layout,
    layers: LayerCosts,
    dependencies: Dependencies,
    costs: Costs,
) -> Offloading:
    """The works of a plan's `offload` lines.

    costs: those of the stages, with the activations that recomputation leaves. Raises `DiagnosticError` (S155) where a
    line moves what is read at once.
    """
    assert plan.host is not None, "`offload` was checked beside `host`"
    of_stage = costs.resolved(dependencies.schedule.stages)
    duration = durations(dependencies, of_stage)
    start, end = run_durations(dependencies, duration, of_stage.p2p)
    memory = directives.tree.memory
    in_bytes = plan.host.in_bytes
    extra = extra_memory(plan, layout, layers.activations, dependencies.schedule, in_bytes)
    inside = held_inside(dependencies.schedule, of_stage, extra.slots.in_flight)
    second = np.where(dependencies.second >= 0, inside[dependencies.second], 0.0)
    held = np.maximum(inside[dependencies.first], second)
    step = _Step(dependencies, of_stage, plan.host, held, duration, start, end)
    if plan.offload[0].scope != "auto":
        return step.priced(_as_written(directives, plan, step), None)
    assert memory is not None, "`offload auto` was checked beside the memory"
    return _chosen(step, amount(memory) - standing_memory(layout, layers, dependencies.schedule, extra))


def _as_written(directives: Directives, plan: Attachments, step: _Step) -> PlacedWorks:
    """What the lines say. Each stage is judged alone."""
    schedule = step.dependencies.schedule
    kept = kept_per_stage(plan.offload, schedule.stages, schedule.placement)
    named = {number for rule in plan.offload if rule.scope == "stage" for number in rule.numbers}
    works: list[PlacedWork] = []
    for rank in range(schedule.ranks):
        moves: list[Move] = []
        stays = step.stays(rank)
        for stage in sorted({stay.stage for stay in stays} & kept.keys()):
            own = [stay for stay in stays if stay.stage == stage]
            if stage in named and all(stay.used - stay.made < 2 for stay in own):
                raise DiagnosticError([_read_at_once(directives, own[0])])
            idle = np.zeros(step.start[step.cells(rank)].size + 1)
            np.add.at(idle, [stay.made + 1 for stay in own], [stay.bytes for stay in own])
            np.add.at(idle, [stay.used for stay in own], [-stay.bytes for stay in own])
            held, size = np.cumsum(idle)[:-1], max(stay.bytes for stay in own)
            chosen = choose_moves(held, own, kept[stage] * size)
            moves += give_time(chosen, held, (kept[stage] + _ON_THE_WAY) * size, step.times(rank))
        works += works_of(moves, step.dependencies, rank)
    return PlacedWorks.of(works)


def _read_at_once(directives: Directives, stay: Stay) -> Diagnostic:
    message = f"stage {stay.stage} reads at once what its forward leaves, and nothing of it can leave"
    note = f"{stay.stage}F{stay.microbatch} and its backward follow each other on their rank"
    help = "offload stages that hold several microbatches: those of the first ranks"
    label = Label(directives.span("offload"))
    return Diagnostic("S155", message, label, notes=(note,), help=help, source=directives.tree.source)


def _chosen(step: _Step, room: Floats) -> Offloading:
    """The shortest step of those that keep some places free; fewer places, and so fewer moves, where it is the same.

    room: [P] memory for activations.
    """
    best: Offloading | None = None
    for kept_free in _KEPT_FREE:
        works: list[PlacedWork] = []
        fits = True
        for rank in range(room.size):
            held, stays = step.held[step.cells(rank)].copy(), step.stays(rank)
            reserve = kept_free * max((stay.bytes for stay in stays), default=0.0)
            if held.max(initial=0.0) <= room[rank] * (1 + 1e-12):
                continue
            moves = choose_moves(held, stays, max(room[rank] - reserve, 0.0))
            fits &= bool(held.max() <= room[rank] * (1 + 1e-12))
            works += works_of(give_time(moves, held, room[rank], step.times(rank)), step.dependencies, rank)
        offloading = step.priced(PlacedWorks.of(works), kept_free)
        if best is None or (fits and offloading.makespan < best.makespan * (1 - 1e-9)):
            best = offloading
        if not fits or best.makespan <= best.uncapped * (1 + 1e-9):
            break
    assert best is not None, "one number of places is tried"
    return best


def host_bytes(placed: PlacedWorks, dependencies: Dependencies) -> Floats:
    """[gaps] memory on the host behind each gap: from the START of an offload to the JOIN of the fetch behind it."""
    gaps = len(dependencies) + dependencies.rank_start.size - 1
    gap = np.where(placed.comes, placed.join, placed.start)
    change = np.where(placed.comes, -placed.works.bytes, placed.works.bytes)
    return np.cumsum(bincount(gap, weights=change, minlength=gaps))


def check_host(directives: Directives, placed: PlacedWorks, dependencies: Dependencies) -> None:
    """Raises `DiagnosticError` (S155) where a rank has more on the host than the plan says."""
    host, on_host = directives.plan.host, host_bytes(placed, dependencies)
    if host is None or not on_host.size or on_host.max() <= host.size * (1 + 1e-12):
        return
    gap = int(np.argmax(on_host))
    rank = int(placed.rank_of(np.array([gap]), dependencies)[0])
    cell = min(gap - rank, int(dependencies.rank_start[rank + 1]) - 1)
    op = dependencies.schedule.op(int(dependencies.first[cell]))
    write = shown if host.in_bytes else plain
    most, name = write(float(on_host[gap]), up=True), f"{op.stage}{op.kind.name}{op.microbatch}"
    message = f"rank {rank} has {most} on the host in front of {name}, and the plan says {write(host.size)}"
    help = f"say `host {most}` if there is so much, or let less leave: `keep` more, or allow more `memory`"
    label = Label(directives.span("host"))
    raise DiagnosticError([Diagnostic("S155", message, label, help=help, source=directives.tree.source)])


def lane_facts(offloading: Offloading, dependencies: Dependencies) -> Iterator[dict[str, float | int | str]]:
    """One row for each rank and lane that works use: moves, memory that moves, time of the lane, and exposed time."""
    lanes, placed = offloading.lanes, offloading.placed
    columns = [np.ones(len(placed)), placed.works.bytes, offloading.time, lanes.exposed]
    count, size, busy, exposed = (lanes.per_rank(placed, dependencies, values) for values in columns)
    for rank, lane in np.argwhere(count > 0).tolist():
        row: dict[str, float | int | str] = {"rank": rank, "lane": WorkLane(lane).name.lower()}
        row |= {"works": int(count[rank, lane]), "bytes": float(size[rank, lane])}
        yield row | {"busy": float(busy[rank, lane]), "exposed": float(exposed[rank, lane])}
