"""Pieces of a state beside a step: no offload waits for them, and what is exposed follows from the lane's free time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.elaborate import elaborate
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkKind, WorkLane
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks
from schedc.step.works.place_snapshots import evenly_held, place_snapshots, snapshot_price
from support.random_works import placed_under

CASES = [
    ("1f1b", {"P": 4, "M": 9}),
    ("zbv", {"P": 3, "M": 7}),
    ("dualpipe", {"P": 4, "M": 8}),
    ("gpipe", {"P": 2, "M": 3}),
]


def step_of(name: str, sizes: dict[str, int], offloads: bool) -> StepWorks:
    dependencies, costs = Dependencies.of(elaborate(open_schedule(name), sizes)), Costs(p2p=0.25)
    cells = CellTimes.of(dependencies, costs.resolved(dependencies.schedule.stages))
    placed = placed_under(dependencies, costs, 2.0, 1.0) if offloads else PlacedWorks.none()
    return StepWorks(placed, np.random.default_rng(3).uniform(0.1, 0.6, len(placed)), cells, True)


@pytest.mark.parametrize(("name", "sizes"), CASES)
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("part", [0.01, 0.4, 0.95, 3.0])
def test_pieces_fill_a_lane_that_is_free(name: str, sizes: dict[str, int], offloads: bool, part: float) -> None:
    """part: time of all copies of a rank, in steps."""
    step = step_of(name, sizes, offloads)
    dependencies, alone = step.cells.dependencies, step.lanes
    ranks, per_byte = dependencies.schedule.ranks, 1e-9
    end = max(float(alone.closed.max()), step.cells.makespan)
    size = part * end / per_byte
    price = snapshot_price(step, evenly_held(dependencies, size), per_byte)
    placed, lanes = price.step.placed, price.step.lanes
    other = placed.works.kind != WorkKind.SNAPSHOT
    assert price.bytes == pytest.approx(np.full(ranks, size))
    assert price.fits + price.exposed == pytest.approx(price.bytes)
    assert lanes.begin[other] == pytest.approx(alone.begin, rel=1e-9), "no offload waits for a piece"
    assert lanes.end == pytest.approx(alone.end, rel=1e-9)
    rank, to_host = placed.rank_of(placed.start, dependencies)[other], placed.works.lane[other] == WorkLane.D2H
    busy = np.bincount(rank[to_host], step.time[to_host], ranks)
    exposed = (size - (end - busy) / per_byte).clip(0.0)
    assert price.exposed == pytest.approx(exposed, rel=1e-6, abs=size * 1e-9)
    assert price.longer == pytest.approx(exposed.max() * per_byte, abs=1e-6 * end)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_without_speeds_pieces_follow_the_cells(name: str, sizes: dict[str, int]) -> None:
    step = step_of(name, sizes, False)
    dependencies, costs = step.cells.dependencies, Costs(p2p=0.25)
    schedule = dependencies.schedule
    sizes_of = np.arange(schedule.stages) * 1e6
    placed = place_snapshots(step.cells, sizes_of)
    rank = placed.rank_of(placed.start, dependencies)
    for each in range(schedule.ranks):
        held = np.unique(schedule.placement.rank_of_stage == each, axis=0).any(0)
        own = rank == each
        assert np.bincount(placed.works.stage[own], placed.works.bytes[own], schedule.stages) == pytest.approx(
            np.where(held, sizes_of, 0.0)
        ), "stage 0 has no state"
        last = dependencies.rank_start[each + 1] + each
        assert (placed.start[own] < last).all()
        assert (placed.join[own] == last).all()
        if own.any():  # what has started when the rank is half way through is half of it, but for one cell
            ends = step.cells.end[dependencies.rank_start[each] : dependencies.rank_start[each + 1]]
            gap = int(np.searchsorted(ends, ends[-1] / 2)) + dependencies.rank_start[each] + each
            longest = np.diff(ends, prepend=0.0).max() / ends[-1]
            half = placed.works.bytes[own & (placed.start <= gap)].sum() / placed.works.bytes[own].sum()
            assert half == pytest.approx(0.5, abs=longest + 1e-9)
    program = insert_works(insert_communication(schedule, costs), dependencies, placed)
    assert verify_program(program) == []


def test_check_says_what_fits() -> None:
    def check(*options: str) -> tuple[int, str]:
        ran = CliRunner().invoke(main, ["check", "1f1b", "-D", "P=4", "-D", "M=8", *options])
        return ran.exit_code, ran.output

    given = ("--snapshot", "1.1 GB", "--copy-speed", "20GB/s")
    status, text = check(*given, "--json")
    facts = json.loads(text)
    assert status == 0
    assert facts["makespan"] == 33.0  # (M + P - 1) * 3 ms, so that 660 MB are copied
    assert facts["snapshot"]["exposed"] == pytest.approx([440e6] * 4)
    assert facts["snapshot"]["fits"] == pytest.approx([660e6] * 4)
    assert facts["snapshot"]["longer"] == pytest.approx(22.0)
    assert "660 MB fit beside the step, 440 MB are exposed; the step takes 22 ms more" in check(*given)[1]
    assert "all of it fits beside the step" in check("--snapshot", "659MB", "--copy-speed", "20GB/s")[1]
    for options, why in (
        (("--snapshot", "1GB"), "--snapshot and --copy-speed go together"),
        (("--snapshot", "1", "--copy-speed", "20GB/s"), "'1' is no size: write it as `10.5GB`"),
        (("--snapshot", "1GB", "--copy-speed", "20GB"), "'20GB' is no speed: write it as `20GB/s`"),
        ((*given, "--sweep", "P<=4"), "--snapshot is priced at one size"),
    ):
        status, text = check(*options)
        assert (status, why in text) == (2, True), text
