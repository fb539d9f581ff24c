"""Measures what a search over plans does many times: simulations of many orders under many costs, floors, and peaks.

    python benchmarks/planner.py [--json] [--only SECTION ...] [--orders 500] [--simulations 1000000]

A section measures one thing and prints its own figures; `SECTIONS` lists them.

``simulations``: complete timelines of 500 distinct orders of the library under costs per stage, none of them repeated.
Elaborating the orders and finding their dependencies is included. Schedules whose order follows from their costs have
no order to share, and are left out.
``bound``: bounds of every legal plan of the 718B model on 6,144 devices, in the standard and in the wide space. What
plans share, the parts of the model and what schedules claim, is included. The rate is that of the slower space.
``delays``: simulations from inside of cells under given delays, by `message_makespans`.
``floors``: steps below which no order inside the cells brings a schedule, by `floor_batch`.
``peaks``: peaks of memory of every rank, by `PeakCounts`.
``price``: `price_plan` of one plan of deepseek-v3 by `dualpipev` on 16 ranks.
``programs``: a `dualpipev` priced from inside, with new cell programs and then with those of cells that take as long.

Instrument: processor time of one warm process, with one thread at work. Only drawing the costs, and comparing some
answers with the same cost alone, are outside the timing. Compiled loops are loaded before, where numba is installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
from figures import give, parser_of

from schedc.cell import CellCosts, SegmentTimes, StageShape, stage_shape
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.schedule import forget_programs
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import names, open_schedule
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.step import numba_kernels as compiled
from schedc.step import turn_loops
from schedc.step.batch import simulate_batch
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.floors import floor_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.messages import message_makespans, simulate_messages
from schedc.step.peak_counts import PeakCounts
from schedc.step.timeline import simulate
from schedc.syntax.tree import ScheduleTree

ORDERED_BY_COSTS = ("adaptive_pipe", "zb_auto", "zb_greedy")
RANKS = (4, 8, 12, 16, 24, 32)
PER_RANK = (2, 4, 5, 6, 8, 10)
"""Microbatches by rank."""

CELLS = {"1f1b": 4, "interleaved_overlap": 2, "dualpipev": 2, "zbv": 2}
"""Layers of a stage on 16 ranks, by schedule, for floors and peaks."""

Facts = dict[str, Any]


class Clock:
    """Processor time of this process, in seconds, while it runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._start


# Simulations of many orders.


def sizes_of_orders() -> Iterator[tuple[str, dict[str, int]]]:
    """(schedule, sizes), the schedules in turn, so that the first so many have all schedules and sizes."""
    fixed = [name for name in names() if name not in ORDERED_BY_COSTS]
    sizes = [{"P": P, "M": many * P} for many, P in product(PER_RANK, RANKS)]
    steps = np.random.default_rng(0).permutation(len(sizes)).tolist()
    for turn, name in product(steps, fixed):
        yield name, sizes[turn]


def legal_orders(clock: Clock) -> Iterator[Schedule]:
    """Every legal order among `sizes_of_orders`, with the time of elaborating it on the clock."""
    trees: dict[str, ScheduleTree] = {name: open_schedule(name) for name in names()}
    for name, sizes in sizes_of_orders():
        with clock:
            try:
                order = elaborate(trees[name], sizes)
            except DiagnosticError:  # sizes that its `require` refuses
                continue
        yield order


def costs_of(rng: np.random.Generator, count: int, stages: int) -> CostBatch:
    """Random costs per stage; as many as ``count``."""
    columns = {name: rng.uniform(0.5, 2.0, (count, stages)) for name in "FIW"}
    return CostBatch(**columns, p2p=rng.uniform(0.05, 0.2, count))


def measure_simulations(arguments: argparse.Namespace) -> Facts:
    """A million simulations, evenly over the orders."""
    rng = np.random.default_rng(1)
    orders, dependencies, simulating = Clock(), Clock(), Clock()
    ops, total, seen = 0, 0.0, set[bytes]()
    bounds = np.linspace(0, arguments.simulations, arguments.orders + 1).astype(int)
    for number, schedule in enumerate(islice(legal_orders(orders), arguments.orders)):
        costs = costs_of(rng, int(bounds[number + 1] - bounds[number]), schedule.stages)
        with dependencies:
            cells = Dependencies.of(schedule)
            cells.levels  # noqa: B018 - found when first asked for
        with simulating:
            makespan = simulate_batch(cells, costs).makespan
        total += float(makespan.sum())
        ops += len(schedule)
        seen.add(schedule.kind.tobytes() + schedule.stage.tobytes() + schedule.microbatch.tobytes())
        compare_timeline(schedule, costs, makespan)
    spent = (orders.seconds, dependencies.seconds, simulating.seconds)
    million = 1e6 / arguments.simulations
    return {
        "million_simulations_s": sum(spent) * million,
        "simulations": {
            "count": arguments.simulations,
            "orders": number + 1,
            "distinct_orders": len(seen),
            "mean_ops": ops / (number + 1),
            "mean_makespan": total / arguments.simulations,
            **dict(zip(("elaboration_s", "dependencies_s", "simulations_s"), spent, strict=True)),
        },
    }


def compare_timeline(schedule: Schedule, costs: CostBatch, makespan: Any) -> None:
    """Compares one answer, in [K] makespans, with the same cost alone."""
    middle = len(costs) // 2
    alone = {name: tuple(getattr(costs, name)[middle].tolist()) for name in "FIW"}
    assert costs.p2p is not None
    if simulate(schedule, Costs(**alone, p2p=float(costs.p2p[middle]))).makespan != makespan[middle]:
        raise SystemExit(f"{schedule.name}: a simulation among many differs from the same one alone")


# Bounds of all plans.


def measure_bound(_arguments: argparse.Namespace) -> Facts:
    """Bounds of both spaces of the largest model, one after the other."""
    model, cluster = open_model("pangu-ultra-moe-718b"), open_cluster("ascend-910b", 6144)
    spaces = {kind: PlanSpace.of(model, cluster, 4608, 8192, kind) for kind in ("standard", "wide")}
    rows = {kind: bounds_of(space) for kind, space in spaces.items()}
    return {"bound": {"legal_plans_per_s": min(row["legal_plans_per_s"] for row in rows.values()), **rows}}


def bounds_of(space: PlanSpace) -> Facts:
    """Legal plans of a space that get a bound, those among them that may fit, and processor time."""
    bounded, fit = 0, 0
    with (clock := Clock()):
        problem = PlanProblem(space.model, space.cluster, space.batch)
        bounds = PlanBounds(space, problem, PartTable.of(problem, splits_of(space)))
        for block in bounds.blocks():
            bounded += len(block.block)
            fit += int(np.count_nonzero(block.fits))
    rate = bounded / clock.seconds
    return {"raw": space.raw, "bounded": bounded, "fit": fit, "seconds": clock.seconds, "legal_plans_per_s": rate}


# An order from inside its cells.


def measure_delays(_arguments: argparse.Namespace) -> Facts:
    """Simulations per second of one order on 16 ranks, for 2,048 costs, and milliseconds for 16 and for one."""
    rng = np.random.default_rng(4)
    rows: Facts = {}
    for name in CELLS:
        cells = order_of(name)
        kind, delay = rng.integers(0, 12, len(cells)), rng.uniform(0, 3, (12, 3, 3, 2048))
        delay[::3, :, 1], delay[1::3, :, 2] = -np.inf, -np.inf
        latency = rng.uniform(0, 1, 2048)
        spent = {}
        for count in (2048, 16, 1):
            makespans, spent[count] = fastest(
                partial(message_makespans, cells, kind, delay[..., :count], latency[:count])
            )
        alone = simulate_messages(cells, kind, np.zeros(len(delay)), delay[..., 0], latency[0]).timeline
        if alone.makespan != makespans[0]:
            raise SystemExit(f"{name}: a simulation among many differs from the same one alone")
        rows[name] = {"per_s": 2048 / spent[2048], "ms_of_16": spent[16] * 1e3, "ms_of_1": spent[1] * 1e3}
    return {"delays": rows}


def order_of(name: str) -> Dependencies:
    return Dependencies.of(elaborate(open_schedule(name), {"P": 16, "M": 128}))


def shapes_of(stages: int, layers: int) -> list[StageShape]:
    """[stages] graphs of so many layers with experts; the first stage has a dense one, the last has one less."""
    last = ["moe"] * (layers - 1)
    first, end = stage_shape(["dense", *last], "hierarchical"), stage_shape(last, "hierarchical", tail_weights=True)
    return [first, *[stage_shape(["moe"] * layers, "hierarchical")] * (stages - 2), end]


def cell_costs(rng: np.random.Generator) -> CellCosts:
    segments = ("attention", "permute", "experts", "shared", "post")
    exchanges = [f"{role}.{lane}" for role in ("routing", "dispatch", "combine") for lane in ("rail", "node")]
    return CellCosts.of(
        {role: SegmentTimes(*rng.uniform(1, 9, 3).tolist()) for role in segments},
        {name: float(rng.uniform(1, 9)) for name in exchanges},
    )


def measure_floors(_arguments: argparse.Namespace) -> Facts:
    """Floors per second of one order on 16 ranks, for 2,000 and for 16 costs, with the graphs of three stages."""
    rng = np.random.default_rng(2)
    costs = [cell_costs(rng) for _ in range(2000)]
    p2p = rng.uniform(0, 1, len(costs))
    return {"floors": {name: floors_of(name, layers, costs, p2p) for name, layers in CELLS.items()}}


def floors_of(name: str, layers: int, costs: list[CellCosts], p2p: Any) -> Facts:
    """Floors per second of one schedule with so many layers on a stage. p2p: [costs] latencies of messages."""
    cells = order_of(name)
    shapes = shapes_of(cells.schedule.stages, layers)
    rates = {}
    for count in (16, len(costs)):
        floors, seconds = fastest(partial(floor_batch, cells, shapes, CellCostBatch.of(costs[:count]), p2p[:count]))
        rates[f"per_s_of_{count}"] = count / seconds
        if floors[5] != price(cells, shapes, costs[5], float(p2p[5])).floor:
            raise SystemExit(f"{name}: a floor among many differs from the same one alone")
    return rates


def measure_peaks(_arguments: argparse.Namespace) -> Facts:
    """Time to find the counts of one order on 16 ranks, and peaks of all ranks for 2,000 costs per second."""
    rng = np.random.default_rng(3)
    rows = {}
    for name in CELLS:
        cells = order_of(name)
        sizes = rng.uniform(1, 2, (2, 2000, cells.schedule.stages))
        counts, finding = fastest(partial(PeakCounts.of, cells))
        peaks, multiplying = fastest(partial(counts.peaks, *sizes))
        alone = Costs(activation=tuple(sizes[0, 5]), pending_weight=tuple(sizes[1, 5]))
        if not np.allclose(peaks[:, 5], measure_memory(cells.schedule, alone, cells).peak_memory, rtol=1e-12, atol=0):
            raise SystemExit(f"{name}: a peak among many differs from the same one alone")
        most = max(len(rank.counts) for rank in counts.ranks)
        rows[name] = {"rows": most, "counts_ms": finding * 1e3, "costs_per_s": 2000 / multiplying}
    return {"peaks": rows}


def measure_programs(_arguments: argparse.Namespace) -> Facts:
    """Seconds to price a `dualpipev` on 16 ranks from inside, with its cell programs new and kept."""
    cells, costs = order_of("dualpipev"), cell_costs(np.random.default_rng(5))
    shapes = shapes_of(cells.schedule.stages, CELLS["dualpipev"])
    segments = {**dict(costs.segments), "9.experts": SegmentTimes(3.0, 3.0, 3.0)}  # no stage has this layer
    elsewhere = CellCosts.of(segments, dict(costs.exchanges))
    seconds, steps = {}, set()
    forget_programs()
    for case, own in {"new_s": costs, "same_times_s": elsewhere, "again_s": elsewhere}.items():
        with (clock := Clock()):
            priced = price(cells, shapes, own, 0.1)
        seconds[case] = clock.seconds
        steps.add(priced.late_wait.makespan)
    if len(steps) > 1:
        raise SystemExit("cell programs that were kept give other steps")
    return {"programs": {"kinds": len(priced.kinds), **seconds}}


def measure_price(_arguments: argparse.Namespace) -> Facts:
    """Milliseconds to price the best plan of deepseek-v3 by `dualpipev` on 16 ranks, the fastest of five times ten."""
    model, cluster = open_model("deepseek-v3").at(4096), open_cluster("h800", 1024)
    conditions = [read_condition(text, schedules=names()) for text in ("pp == 16", "schedule == dualpipev")]
    space = PlanSpace.of(model, cluster, 1024, 4096, "standard", conditions)
    (found,) = search(space, PlanProblem(model, cluster, 1024), SearchOptions(top=1)).plans
    assert found.priced is not None
    planned = found.priced.planned
    _, seconds = fastest(lambda: [price_plan(planned) for _ in range(10)])
    return {"price": {"plan": str(planned.axes), "ms": seconds * 100}}


def fastest(run: Callable[[], Any]) -> tuple[Any, float]:
    """What ``run`` gives, and the least processor time of five runs, in seconds."""
    times = []
    for _ in range(5):
        start = time.process_time()
        answer = run()
        times.append(time.process_time() - start)
    return answer, min(times)


SECTIONS: Mapping[str, Callable[[argparse.Namespace], Facts]] = {
    "simulations": measure_simulations,
    "bound": measure_bound,
    "delays": measure_delays,
    "floors": measure_floors,
    "peaks": measure_peaks,
    "programs": measure_programs,
    "price": measure_price,
}
"""What is measured, by the name of the section; each gives keys of the JSON object that no other one gives."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--orders", type=int, default=500)
    parser.add_argument("--simulations", type=int, default=1_000_000)
    arguments = parser.parse_args()
    facts: Facts = {"instrument": "CPU time of one thread", "numba": compiled.kernels(float("inf")) is not None}
    warm = Dependencies.of(elaborate(open_schedule("1f1b"), {"P": 8, "M": 2000}))
    simulate_batch(warm, costs_of(np.random.default_rng(0), 100, warm.schedule.stages))
    turn_loops.load_loop()
    elaborate(open_schedule("vhalf"), {})
    for name in arguments.only:
        facts |= SECTIONS[name](arguments)
    give(facts, arguments)


if __name__ == "__main__":
    main()
