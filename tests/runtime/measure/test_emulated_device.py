"""Emulated device time: the clocks of ranks, and the steps that `schedc check` predicts for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import schedc
from schedc.cell.predict import predict
from schedc.ir.program import computation
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.group_pricing import RankRows
from schedc.step.dependencies import Dependencies
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.code import BoundStep, Code
from schedc_runtime.execute.handlers import forward
from schedc_runtime.execute.operands import WorkOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.execute.works import join_work, start_work
from schedc_runtime.measure.emulated_device import Device, LaneTime
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.transport.in_process import InProcessNetwork
from support.segmented_cases import COSTS, listed, small_moe, together
from support.sweeps import halved


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


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["dualpipev", "zbh1"]))
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


class Moving:
    """A stage whose offloads and fetches move 40 bytes."""

    index = 0

    def start_offload(self, microbatch: int) -> int:
        return 40

    def join_offload(self, microbatch: int) -> int:
        return 40

    def start_fetch(self, microbatch: int) -> int:
        return 40

    def join_fetch(self, microbatch: int) -> None:
        return


class Replicated:
    """A stage whose gathers and sums move 40 bytes among four replicas."""

    index, members = 0, 4

    def start_gather(self) -> int:
        return 40

    start_scatter = start_spread = start_gather

    def ready(self) -> bool:
        return True

    def drop(self) -> None:
        return

    join_gather = join_scatter = join_spread = drop


def test_a_work_takes_its_bytes_over_the_speed_of_its_lane() -> None:
    device = Device(COSTS, speeds={"d2h": 2.0, "h2d": 4.0, "dp": 3.0})
    registers = Registers([], 0, InProcessNetwork(1).transport(0), torch.device("cpu"))
    program = schedc.compile("1f1b", P=1, M=1)
    leave, later = [WorkOperands("offload", "d2h", Moving(), m, m, 20.0) for m in range(2)]
    come = WorkOperands("fetch", "h2d", Moving(), 0, 2)

    def run(handler: Any, operands: WorkOperands) -> float:
        """The clock behind one step of emulated code."""
        code = Code([BoundStep(handler, operands, 0, 1, program.instruction(0))], [], 0, {})
        (step,) = device.code(code).steps
        step.handler(registers, operands)
        return device.clock

    device.clock = 10.0
    assert run(start_work, leave) == 10.0  # until 20
    device.clock = 12.0
    assert run(start_work, later) == run(start_work, come) == 12.0  # behind the first until 30; 40 bytes until 22
    assert run(join_work, leave) == 20.0
    assert run(join_work, come) == 22.0
    device.clock = 50.0
    assert run(join_work, later) == 50.0
    assert device.kinds["offload"] == device.lanes["d2h"]
    gather, drop = (WorkOperands(kind, "dp", Replicated(), -1, n, group=0) for n, kind in ((3, "gather"), (4, "drop")))
    assert run(start_work, gather) == run(start_work, drop) == 50.0  # three quarters of 40 bytes until 60
    assert run(join_work, drop) == 50.0
    assert run(join_work, gather) == 60.0
    assert device.lanes.pop("dp") == LaneTime(10.0, 10.0)
    assert device.lanes == {"d2h": LaneTime(20.0, 8.0), "h2d": LaneTime(10.0, 2.0)}
    assert registers.leftovers() == []
    with pytest.raises(LookupError, match="the program joins the offload of microbatch 0 before its START"):
        run(join_work, leave)
    with pytest.raises(RuntimeFault, match="the emulated device has no lane rail"):
        run(start_work, leave._replace(lane="rail"))
