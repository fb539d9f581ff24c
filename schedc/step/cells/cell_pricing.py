"""Prices a schedule by the segments and exchanges inside its cells: one timeline per treatment of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.delays import Delays, closed_delays, program_delays
from schedc.cell.graph import EXCHANGE_LANES, LINKS, StageShape
from schedc.cell.predict import Prediction, hidden_share, predict
from schedc.cell.program import CellProgram, PlanOrder
from schedc.cell.schedule import cell_program
from schedc.ir.arrays import Floats, Int64
from schedc.ir.works import LANE_NAMES
from schedc.step.cells.cell_forms import CellForm, cell_forms
from schedc.step.cells.floors import floors
from schedc.step.cells.group_pricing import GroupPricing, KindOfCell, RankRows, price_group
from schedc.step.dependencies import Dependencies
from schedc.step.messages import MessageStep, simulate_messages
from schedc.step.placed_works import TimedWorks
from schedc.step.timeline import CellTimes, Timeline, run_durations


@dataclass(frozen=True)
class CellKind(CellForm):
    """The cells of a form, with their common program.

    serial: the time of all its segments and exchanges one after the other.
    """

    program: CellProgram
    prediction: Prediction

    @property
    def program_on_ranks(self) -> KindOfCell:
        return KindOfCell(self.program, self.forward, self.backward)

    @property
    def serial(self) -> float:
        return self.prediction.compute + self.prediction.communication


class WorksInside(NamedTuple):
    """Works beside cells that are priced from inside.

    exposed: [works] time that a rank stands at the JOIN, the mean over a group.
    """

    timed: TimedWorks
    exposed: Floats

    @property
    def lanes(self) -> dict[str, tuple[float, float]]:
        """(busy, exposed) of each lane that works use, summed over pipeline ranks, in the unit of the costs."""
        lane = self.timed.placed.works.lane
        return {
            LANE_NAMES[at]: (float(self.timed.time[lane == at].sum()), float(self.exposed[lane == at].sum()))
            for at in np.unique(lane).tolist()
        }


@dataclass(frozen=True, eq=False)
class CellPricing:
    """A schedule priced by its segments and exchanges, in the unit of ``costs``. Timelines are found when asked for.

    kinds: what cells there are; kind: [cells] index into it. costs: of their segments and exchanges. p2p: latency of a
    message. ranks: an expert group whose ranks have different rows, or a rank whose microbatches cost unequally.
    Timelines are then those of the rank that ends last, and the predictions of ``kinds`` those at the mean rows, of a
    microbatch of factor 1. timed: works beside the cells in all timelines.
    """

    dependencies: Dependencies
    kinds: tuple[CellKind, ...]
    kind: Int64
    costs: CellCosts
    p2p: float
    ranks: RankRows | None = None
    timed: TimedWorks | None = None

    @cached_property
    def serial(self) -> Timeline:
        """Every cell runs its segments and exchanges one after the other, and its messages leave at its end."""
        if self.ranks is not None:
            return self._in_step([of.program_on_ranks.serial for of in self.kinds], closed=True).timeline
        return self._closed([of.serial for of in self.kinds])

    @cached_property
    def overlapped(self) -> Timeline:
        """Cells run their programs, begin when all their messages are there, and send at their ends."""
        if self.ranks is not None:
            return self._in_step([of.program_on_ranks for of in self.kinds], closed=True).timeline
        return self._closed([of.prediction.duration for of in self.kinds])

    @cached_property
    def closed(self) -> CellTimes:
        """When cells run that wait for all their messages and send at their ends, without works beside them.

        Over a group each takes the time of the rank that ends last.
        """
        if self.ranks is not None:
            duration = self.overlapped.end - self.overlapped.start
        else:
            duration = np.array([of.prediction.duration for of in self.kinds])[self.kind]
        times = run_durations(self.dependencies, duration, self.p2p)
        return CellTimes(self.dependencies, duration, *times, self.p2p, np.zeros(len(LANE_NAMES)))

    @cached_property
    def early_send(self) -> Timeline:
        """As overlapped, but a message leaves when the half that computes it is complete."""
        if self.ranks is not None:
            return self._in_step([of.program_on_ranks.opened_early for of in self.kinds]).timeline
        return self._open(opens_late=False).timeline

    @cached_property
    def late_wait(self) -> Timeline:
        """As early_send; in addition each half waits for its message only before its own first step."""
        return (self._played or self._alone).timeline

    @property
    def group(self) -> GroupPricing | None:
        """The step of ``late_wait`` on all ranks of an expert group; None where all have as many rows."""
        return self._played if self.ranks is not None and self.ranks.differ else None

    @cached_property
    def _played(self) -> GroupPricing | None:
        """The step of ``late_wait`` task by task; None where one prediction of a kind is that of all its cells."""
        return None if self.ranks is None else self._in_step([of.program_on_ranks for of in self.kinds])

    @cached_property
    def _alone(self) -> MessageStep:
        return self._open(opens_late=True)

    @property
    def works(self) -> WorksInside | None:
        """The works in ``late_wait``; None without works."""
        exposed = self._played.works if self._played else self._alone.works and self._alone.works[2]
        return None if self.timed is None or exposed is None else WorksInside(self.timed, exposed)

    @cached_property
    def least_costs(self) -> CellCosts:
        """Times that the rank with the most rows takes at least, in all cells of microbatches of factor 1.

        Where cells have different numbers of copies of experts, some may send none.
        """
        if self.ranks is None:
            return self.costs
        costs = self.costs.with_rows(*self.ranks.least)
        return costs if self.ranks.copies is None else costs.without_exchange("hot")

    @cached_property
    def floor(self) -> float:
        """Makespan below which no order inside the cells brings the step.

        Every microbatch counts as the cheapest one.
        """
        cheapest = 1.0 if self.ranks is None else self.ranks.cheapest
        batch, p2p = CellCostBatch.of([self.least_costs]), np.array([self.p2p / cheapest if cheapest else 0.0])
        return cheapest * float(floors(self.dependencies, self.kinds, self.kind, batch, p2p)[0])

    def _in_step(self, programs: Sequence[KindOfCell], closed: bool = False) -> GroupPricing:
        assert self.ranks is not None
        return price_group(self.dependencies, programs, self.kind, self.costs, self.ranks, self.p2p, closed, self.timed)

    def _closed(self, duration: Sequence[float]) -> Timeline:
        return self._step(duration, map(closed_delays, duration)).timeline

    def _open(self, opens_late: bool) -> MessageStep:
        programs = (replace(of.program, opens_late=opens_late) for of in self.kinds)
        delays = (
            program_delays(program, of.forward, of.backward, self.costs)
            for program, of in zip(programs, self.kinds, strict=True)
        )
        return self._step([of.prediction.duration for of in self.kinds], delays)

    def _step(self, duration: Sequence[float], delay: Iterable[Delays]) -> MessageStep:
        delays = np.array(list(delay)).reshape(-1, 3, 3)
        return simulate_messages(self.dependencies, self.kind, np.array(duration), delays, self.p2p, self.timed)

    def communication(self, pairs_only: bool = False) -> tuple[float, float]:
        """(time, exposed) of all exchanges of the step, or of those in overlapped pairs; means over a group."""
        if self._played is not None:
            return self._played.communication(self.dependencies.pairs if pairs_only else slice(None))
        kinds = [kind for kind in self.kinds if len(kind.kind) == 2 or not pairs_only]
        time = sum(kind.count * kind.prediction.communication for kind in kinds)
        return time, sum(kind.count * kind.prediction.exposed for kind in kinds)

    def kind_on(self, name: str, stages: tuple[int, int] | None) -> CellKind | None:
        """The kind of the cells of one name, ``FB``, on these stages, else of the most of them; None without any."""
        if stages is None:
            return max((kind for kind in self.kinds if kind.kind == name), key=lambda kind: kind.count, default=None)
        dependencies = self.dependencies
        stage = dependencies.schedule.stage
        there = (stage[dependencies.first] == stages[0]) & (
            stage[np.where(dependencies.second >= 0, dependencies.second, dependencies.first)] == stages[1]
        )
        kinds = (self.kinds[index] for index in np.unique(self.kind[there]).tolist())
        return next((kind for kind in kinds if kind.kind == name), None)

    @cached_property
    def idle(self) -> dict[str, float]:
        """Mean time of a rank in which it runs no cell or waits for a message, by treatment of messages."""
        named = {"overlapped": self.overlapped, "early": self.early_send, "inside": self.late_wait}
        return {name: float(timeline.bubble.mean()) for name, timeline in named.items()}

    @property
    def hidden_step(self) -> float:
        """1 - exposed / communication, summed over all cells of all ranks; 1 where nothing is communicated."""
        return hidden_share(*self.communication())

    @property
    def hidden_steady(self) -> float | None:
        """1 - exposed / communication, summed over the overlapped pairs; None where the schedule has none."""
        has_pairs = any(len(kind.kind) == 2 for kind in self.kinds)
        return hidden_share(*self.communication(pairs_only=True)) if has_pairs else None

    @cached_property
    def lanes(self) -> dict[str, tuple[float, float]]:
        """(busy, exposed) of each lane over the step, summed over pipeline ranks, the mean over a group.

        The host has an entry where it is asked for sizes.
        """
        return {lane: use for lane, use in self._lanes.items() if lane in LINKS or use[0]}

    @property
    def _lanes(self) -> dict[str, tuple[float, float]]:
        if self._played is not None:
            spent = [lanes.sum(axis=1).mean(axis=1).tolist() for lanes in (self._played.carried, self._played.exposed)]
            return {lane.value: pair for lane, pair in zip(EXCHANGE_LANES, zip(*spent, strict=True), strict=True)}
        return {
            lane.value: (
                sum(kind.count * kind.prediction.lanes[at].busy for kind in self.kinds),
                sum(kind.count * kind.prediction.lanes[at].exposed for kind in self.kinds),
            )
            for at, lane in enumerate(EXCHANGE_LANES)
        }


OrderOf = Callable[[str], PlanOrder | None]
"""Gives the order by hand of a kind of cells, or None."""


def price(
    dependencies: Dependencies,
    shapes: Sequence[StageShape],
    costs: CellCosts,
    p2p: float = 0.0,
    order_of: OrderOf = lambda kind: None,
    recomputed: Sequence[StageShape] | None = None,
    group: RankRows | None = None,
    works: TimedWorks | None = None,
    ordered_by: CellCosts | None = None,
) -> CellPricing:
    """Prices a legal schedule under the costs of its segments and exchanges; times in their unit.

    shapes: [stages] graphs, marked with the nodes that a backward without an R recomputes.
    recomputed: [stages] graphs, marked with the nodes that an R recomputes; by default ``shapes``.
    p2p: latency of a message between ranks. group: ranks of an expert group with their rows, if they differ.
    works: what runs beside the cells. A cell waits for the JOINs in front of it before its first step.
    ordered_by: the times by which orders inside cells are found, by default ``costs``.
    Raises `DiagnosticError` (S323) for an order by hand that cannot run.
    """
    known = cell_forms(dependencies, tuple(shapes), tuple(recomputed or shapes))
    kinds = tuple(_kind(form, costs, ordered_by or costs, order_of) for form in known.forms)
    return CellPricing(dependencies, kinds, known.form, costs, p2p, group, works)


def _kind(form: CellForm, costs: CellCosts, ordered_by: CellCosts, order_of: OrderOf) -> CellKind:
    program = cell_program(form.kind, form.forward, form.backward, ordered_by, order_of(form.kind))
    prediction = predict(program, form.forward, form.backward, costs)
    return CellKind(**vars(form), program=program, prediction=prediction)
