"""Emulated device time: the clocks of ranks, and the steps that `schedc check` predicts for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import schedc
from schedc.analysis.cell_pricing import price
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.group_pricing import RankRows
from schedc.cell.predict import predict
from schedc.ir.program import computation
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.handlers import forward
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.ranks.mesh import Mesh
from support.segmented_cases import COSTS, listed, small_moe, together


@pytest.mark.slow
def test_emulated_time_is_that_of_the_table() -> None:
    program = schedc.compile("dualpipev", P=1, M=4)
    ranks = together(Mesh(1), small_moe(2), program, listed)
    ((place, executor),) = ranks.executors.items()
    device = Device(COSTS, 2e-4)
    executor.code = device.code(executor.code)
    device.begin()
    ranks.step()
    carried = exposed = computed = 0.0
    shapes = {index: stage.shape for index, stage in ranks.stages[place].items()}
    for x in program.instructions(0):
        kind = x.kind_name
        forward = shapes[x.stage] if kind[0] == "F" else None
        backward = shapes[x.last_slot[0]] if kind != "F" else None
        prediction = predict(listed(kind, forward, backward), forward, backward, COSTS)
        carried, exposed = carried + prediction.communication, exposed + prediction.exposed
        computed += prediction.compute
    spent = device.spent.values()
    assert sum(x.carried for x in spent) / 2e-4 == pytest.approx(carried)
    assert sum(x.exposed for x in spent) / 2e-4 == pytest.approx(exposed)
    assert device.busy / 2e-4 == pytest.approx(computed)
    assert device.clock / 2e-4 == pytest.approx(computed + exposed)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dualpipev", "zbh1"])
def test_an_emulated_step_is_the_predicted_one(schedule: str) -> None:
    """Two pipeline ranks times two expert ranks with 1.5 and 0.5 of the mean rows, and messages that take time."""
    program, mesh, rows = schedc.compile(schedule, P=2, M=4), Mesh(2, 2), np.array([[[1.5, 0.5]]])
    ranks = together(mesh, small_moe(4, 0), program, listed)
    starts, devices = SharedStarts.in_memory(mesh), {}
    for place, executor in ranks.executors.items():
        costs = COSTS.with_rows(float(rows[0, 0, place.replica]))
        devices[place] = Device(costs, 1.0, starts[mesh.process(place)], latency=7.0)
        executor.code = devices[place].code(executor.code)
    ranks.step()
    held = {index: stage.shape for stages in ranks.stages.values() for index, stage in stages.items()}
    shapes = [held[index] for index in range(program.stages)]
    cells = Dependencies.of(computation(program)[0])
    predicted = price(cells, shapes, COSTS, p2p=7.0, group=RankRows(rows, shapes))
    assert predicted.group is not None
    assert max(device.clock for device in devices.values()) == predicted.late_wait.makespan
    for name in ("waiting", "exposed"):
        spent = [
            sum(
                getattr(x, name)
                for place, device in devices.items()
                for x in device.spent.values()
                if place.replica == r
            )
            for r in range(2)
        ]
        assert spent == pytest.approx(predicted.group.by_rank[name].tolist())


def test_times_that_are_not_known_are_refused() -> None:
    ranks = together(Mesh(2), small_moe(1, 1), schedc.compile("1f1b", P=2, M=1), listed)
    code = next(iter(ranks.executors.values())).code
    with pytest.raises(RuntimeFault, match="send messages to each other"):
        Device(COSTS).code(code)
    with pytest.raises(RuntimeFault, match="no times of whole stages"):
        Device(COSTS).code(replace(code, steps=[code.steps[0]._replace(handler=forward)]))
