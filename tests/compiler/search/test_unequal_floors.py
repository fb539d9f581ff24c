"""Floors of steps of unequal microbatches against the best orders of small programs, in any order of microbatches."""

from __future__ import annotations

from itertools import pairwise, permutations
from random import Random

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.problem import Freedom, problem_of
from schedc.search.unequal_floors import unequal_floor
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.row_order import MicrobatchPricer
from schedc.step.unequal import CellParts
from support.needs import needed

cp_model = needed("ortools.sat.python.cp_model")

SMALL = (
    ("gpipe", {"P": 2, "M": 3}),
    ("1f1b", {"P": 3, "M": 3}),
    ("zbh1", {"P": 2, "M": 3}),
    ("zbh1", {"P": 3, "M": 4}),
    ("zbh1", {"P": 3, "M": 1}),
    ("zbv", {"P": 2, "M": 2}),
    ("1f1b_overlap", {"P": 2, "M": 3}),
    ("chimera", {"P": 2, "M": 2}),
)
FEW = 3
"""Orders of microbatches that are tried of a program with pairs or two pipes. The floor holds for each of them."""


def best_step(pricer: MicrobatchPricer, costs: list[int], held: np.ndarray, caps: np.ndarray) -> int | None:
    """The least makespan of any order of the cells, with these costs in these places; None without a proof.

    held: [2, stages] memory until the backward has ended, and until the W has. caps: [P].
    """
    known, schedule = pricer.parts.dependencies, pricer.parts.dependencies.schedule
    times = pricer.parts.times(np.array([costs], np.float64)).astype(np.int64).tolist()
    latency, horizon = pricer.latency * (sum(costs) // len(costs)), 2 * sum(times)
    model = cp_model.CpModel()
    start = [model.new_int_var(0, horizon, "") for _ in times]
    end = [first + time for first, time in zip(start, times, strict=True)]
    for low, high in pairwise(known.rank_start.tolist()):
        cells = range(low, high)
        model.add_no_overlap([model.new_fixed_size_interval_var(start[c], times[c], "") for c in cells])
    for producers, remote in zip(known.producers.tolist(), known.remote.tolist(), strict=True):
        for cell, before in enumerate(producers):
            if before >= 0:
                model.add(start[cell] >= end[before] + latency * remote[cell])
    cell = {(OpKind(int(k)), int(s), int(m)): int(c) for k, s, m, c in
            zip(schedule.kind, schedule.stage, schedule.microbatch, known.cell_of, strict=True)}  # fmt: skip
    used: list[list[tuple[object, int]]] = [[] for _ in caps]
    for (kind, stage, microbatch), taken in cell.items():
        if kind != OpKind.F:
            continue
        freed = cell.get((OpKind.B, stage, microbatch), cell.get((OpKind.I, stage, microbatch)))
        weight, rank = cell.get((OpKind.W, stage, microbatch)), int(known.rank[taken])
        model.add(start[freed] >= end[taken])
        spans = [(start[taken], freed, int(held[0, stage]))]
        if weight is not None:
            model.add(start[weight] >= end[freed])
            spans.append((end[freed], weight, int(held[1, stage])))
        for begin, until, amount in spans:
            size = model.new_int_var(0, horizon, "")
            used[rank].append((model.new_interval_var(begin, size, end[until], ""), amount))
    for rank, spans in enumerate(used):
        model.add_cumulative([span for span, _ in spans], [amount for _, amount in spans], int(caps[rank]))
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, end)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, 0.5
    return int(solver.value(makespan)) if solver.solve(model) == cp_model.OPTIMAL else None


def whole_ticks(parts: CellParts, latency: float) -> MicrobatchPricer:
    """The pricer in halves of a unit: all times here are such."""
    return MicrobatchPricer(CellParts(parts.dependencies, 2 * parts.whole, 2 * parts.ops), round(2 * latency))


def drawn(number: int) -> tuple[Schedule, Costs, list[int], np.ndarray]:
    """A program, costs of its ops, of its microbatches, and caps from below its own to room for all."""
    draw = Random(number)
    name, sizes = SMALL[number % len(SMALL)]
    schedule = legal_schedule(open_input(name), sizes)

    def of_stages(values: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(float(draw.choice(values)) for _ in range(schedule.stages))

    costs = Costs(F=of_stages((1, 2, 3)), I=of_stages((1, 2, 3)), W=of_stages((1, 2)), p2p=draw.choice((0.0, 0.5, 1.0)),
                  FB=of_stages((4, 5)) if draw.random() < 0.5 else None,
                  activation=of_stages((1, 2)), pending_weight=draw.choice((0, 1, 1)))  # fmt: skip
    caps = np.floor(measure_memory(schedule, costs).peak_memory * draw.choice((0.6, 0.6, 1.0, 1.3, 9)))
    return schedule, costs, [draw.choice((1, 2, 3, 7)) for _ in range(schedule.microbatches)], caps


@pytest.mark.slow
def test_no_order_of_ops_and_microbatches_undercuts_the_floor() -> None:
    decided = reached = 0
    for number in range(48):
        schedule, costs, microbatches, caps = drawn(number)
        stage_costs = costs.resolved(schedule.stages)
        pricer = whole_ticks(CellParts.of(Dependencies.of(schedule), stage_costs), stage_costs.p2p)
        floor = unequal_floor(pricer, stage_costs, caps)
        assert floor is not None
        held = np.stack([stage_costs.activation, stage_costs.pending_weight]).astype(np.int64)
        tried = [*permutations(microbatches)] if (schedule.pair >= 0).any() or schedule.placement.pipes > 1 else []
        found = [best_step(pricer, list(each), held, caps) for each in sorted({*tried[::2][:FEW], tuple(microbatches)})]
        if None not in found:
            decided += 1
            best = min(each for each in found if each is not None)
            least = floor.ticks(np.array(microbatches, np.int64))
            assert least <= best, (number, schedule.name)
            reached += least == best
    assert decided >= 34
    assert reached >= 8


@pytest.mark.parametrize(("name", "sizes"), [("1f1b", {}), ("zbv", {}), ("vhalf", {}), ("zb_wave", {"w": 2})])
def test_equal_microbatches_give_the_floor_of_their_program(name: str, sizes: dict[str, int]) -> None:
    schedule = legal_schedule(open_input(name), {"P": 4, "M": 8, **sizes})
    costs, caps = Costs(), measure_memory(schedule, Costs()).peak_memory
    own = rank_floors(OpWindows(problem_of(schedule, costs, caps, Freedom())))
    scale, (pricer,) = MicrobatchPricer.alike([Dependencies.of(schedule)], costs)
    floor = unequal_floor(pricer, costs.resolved(schedule.stages), caps)
    assert floor is not None
    assert floor.ticks(np.full(8, 5, np.int64)) / scale / 5 == max(each.makespan for each in own)


@pytest.mark.parametrize("pending", [0.0, 0.5, 1.0])
def test_no_library_order_undercuts_its_floor(pending: float) -> None:
    for name in ("zbh1", "zbh2", "zbv", "vhalf", "vmin", "zb_greedy", "dualpipev"):
        schedule = legal_schedule(open_input(name), {"P": 4, "M": 12})
        costs = Costs(pending_weight=pending)
        _, (pricer,) = MicrobatchPricer.alike([Dependencies.of(schedule)], costs)
        floor = unequal_floor(pricer, costs.resolved(schedule.stages), measure_memory(schedule, costs).peak_memory)
        assert floor is not None
        for drawn_costs in (np.full(12, 4), np.arange(4, 16), np.repeat([2, 9, 2], 4)):
            assert floor.ticks(drawn_costs) <= int(pricer.makespans(drawn_costs[None, None])[0]), name


def test_segments_have_no_floor() -> None:
    schedule = legal_schedule(open_input("seq1f1b"), {"P": 2, "M": 4})
    _, (pricer,) = MicrobatchPricer.alike([Dependencies.of(schedule)], Costs())
    assert unequal_floor(pricer, Costs().resolved(schedule.stages), np.full(schedule.ranks, 9.0)) is None
