"""Runs the steps of a written plan in emulated device time on every process of a pool: the rank's side of `planned`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Half
from schedc.ir.program import Program
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.costs.costs import parse_costs
from schedc_runtime import Pipeline
from schedc_runtime.commands.toy_models import counted_model, toy_model, toy_plan
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.pipeline.build.apply_plan import mesh_for
from schedc_runtime.pipeline.build.assembly import Cut

ENDLESS = 1e30
"""Bytes per second of what travels among replicas, which stands beside the pipeline in a plan's step."""
_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)


@dataclass
class PlannedDevice(Device):
    """A device whose first and last segments of a stage take the times of the parts that are no layers.

    beside: stage, whether it is the last segment, and [3] seconds by half: an op, the embedding; the head.
    """

    beside: Sequence[tuple[int, bool, SegmentTimes]] = ()

    def time(self, op: MicroStep, half: Half) -> float:
        time, shape = super().time(op, half), op.stage.shape
        if half not in _HALVES or shape.nodes[op.node].exchange:
            return time
        segments = [index for index, node in enumerate(shape.nodes) if not node.exchange]
        return time + sum(
            times[_HALVES.index(half)]
            for stage, last, times in self.beside
            if stage == op.stage.index and op.node == segments[-int(last)]
        )


def rank_of_plan(
    rank: int,
    world_size: int,
    plan: str,
    costs: str,
    segments: dict[str, list[float]],
    exchanges: dict[str, list[float]],
    p2p: float,
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Emulated seconds of one step of a plan on this process: its end, and how long it computed.

    plan, costs: texts of the plan file and of its cost file. segments, exchanges: seconds by role. p2p: of a message.
    sizes: rows of a microbatch, tokens of a row, width of the model, and how many of its layers are dense.
    """
    given = parse_costs(Source("plan.costs.toml", costs))
    program = schedc.compile(Text(Source("plan.sched", plan), "planned"), costs=given)
    attached = toy_plan(program.plan)
    mesh = mesh_for(attached, program, None)
    kind = "moe" if attached.experts else "gpt"
    subject = toy_model(kind, program, attached, Namespace(seed=0, blocks=None, **sizes))
    pipe = Pipeline(
        subject.model, program, loss_fn=subject.loss_fn, mesh=mesh, plan=attached,
        cells=given.cell.costs if given.cell else None, cut=Cut(segmented=True), timeout=120,
    )  # fmt: skip
    times = {role: SegmentTimes(*each) for role, each in segments.items()}
    table = CellCosts.of(times, {name: SegmentTimes(*each) for name, each in exchanges.items()})
    device = PlannedDevice(
        table, 1.0, SharedStarts.of_processes(mesh, rank), p2p, {"dp": ENDLESS}, beside=_beside(program, times)
    )
    batch = counted_model(program.microbatches * sizes["rows"], sizes["tokens"], pipe.replica)
    pipe.step(*batch)  # binds
    for bound in pipe._bound_code._bound.values():
        for executor in bound.executors.values():
            executor.code = device.code(executor.code)
    dist.barrier()
    device.begin()
    pipe.step(*batch)
    pipe.close()
    return {"seconds": device.clock, "busy": device.busy}


def _beside(program: Program, times: dict[str, SegmentTimes]) -> list[tuple[int, bool, SegmentTimes]]:
    """What first and last segments take more: an op in each stage, the embedding, the head."""
    ops = [(stage, False, times["op"]) for stage in range(program.stages)]
    return [*ops, (0, False, times["embedding"]), (program.stages - 1, True, times["head"])]
