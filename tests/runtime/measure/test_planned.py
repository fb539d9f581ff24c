"""The verdicts and toys of benchmarks/planned.py, and ops in one piece by its clocks. `test_examples` runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import schedc
from schedc.cell.predict import predict
from schedc.ir.program import computation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.ranks.mesh import Mesh
from support.segmented_cases import COSTS, small_moe, together
from support.sweeps import halved

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ...]]:
    sys.path.insert(0, str(FOLDER))
    try:
        import planned  # type: ignore[import-not-found]
        import planned_steps  # type: ignore[import-not-found]
        import planned_toys  # type: ignore[import-not-found]

        yield planned, planned_steps, planned_toys
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    ("predicted", "emulated", "pairs"),
    [
        ((1.0, 1.2), (1.1, 1.0), [("0", "1")]),
        ((1.2, 1.0), (1.0, 1.1), [("1", "0")]),
        ((1.0, 1.04), (1.1, 1.0), []),
        ((1.0, 1.2), (1.0, 1.01), []),
        ((1.0, 1.03, 1.1), (1.2, 1.15, 1.16), [("0", "2")]),
    ],
)
def test_only_plans_that_differ_enough_must_keep_their_order(
    modules: tuple[ModuleType, ...],
    predicted: tuple[float, ...],
    emulated: tuple[float, ...],
    pairs: list[tuple[str, str]],
) -> None:
    plans = [
        {"file": str(place), "pipeline_s": each[0], "emulated_s": each[1]}
        for place, each in enumerate(zip(predicted, emulated, strict=True))
    ]
    assert modules[0].swapped(plans) == pairs


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["1f1b", "dualpipev_nosplit"]))
def test_ops_in_one_piece_start_and_send_as_a_whole(modules: tuple[ModuleType, ...], schedule: str) -> None:
    """Plans whose exchanges run alone: no message leaves ahead of a weight gradient, or between the ops of a pair."""
    program, mesh, whole_op = schedc.compile(schedule, P=2, M=4), Mesh(2, 2), modules[1].whole_op
    ranks = together(mesh, small_moe(4, 0), program, whole_op)
    starts, devices = SharedStarts.in_memory(mesh), {}
    for place, executor in ranks.executors.items():
        devices[place] = Device(COSTS, 1.0, starts[mesh.process(place)], latency=7.0)
        executor.code = devices[place].code(executor.code)
    ranks.step()
    shapes = {index: stage.shape for stages in ranks.stages.values() for index, stage in stages.items()}
    halves = {
        kind: [
            predict(whole_op(kind, *sides), *sides, COSTS).duration
            for stage in range(program.stages)
            for sides in [(shapes[stage], None) if kind == "F" else (None, shapes[stage])]
        ]
        for kind in "FIW"
    }
    order = Dependencies.of(computation(program)[0])
    line = simulate(order.schedule, Costs(**{kind: tuple(times) for kind, times in halves.items()}, p2p=7.0), order)
    assert max(device.clock for device in devices.values()) == pytest.approx(line.makespan, rel=1e-12)


def test_toys_are_those_of_their_seed(modules: tuple[ModuleType, ...]) -> None:
    toys = modules[2].toys(3, 20)
    assert toys == modules[2].toys(3, 20) != modules[2].toys(4, 20)
    assert {8 <= toy.model.layers <= 16 and 8 <= toy.model.moe.experts <= 16 for toy in toys} == {True}
    assert len({(toy.cluster.devices, toy.cluster.per_node) for toy in toys}) == 4
