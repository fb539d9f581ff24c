"""Runs the steps of a written plan in emulated device time on every process of a pool: the rank's side of `planned`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.program import CellProgram, Half
from schedc.cell.serial import serial
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


Shares = dict[str, tuple[float, float, bool]]
"""By the names of nodes, the part of the forward that runs again ahead of the backward, and the part inside it.

The last value says whether the backward repeats element-wise work.
"""


_WHOLE = (1.0, 0.0, False)


@dataclass
class PlannedDevice(Device):
    """A device whose segments take what the plan was priced with, and not what the toy model would.

    beside: stage, whether it is the last segment, and [3] seconds by half: an op, the embedding; the head.
    again: [stages] what backwards recompute: shares of nodes, or seconds where the op is in one piece.
    """

    beside: Sequence[tuple[int, bool, SegmentTimes]] = ()
    again: Sequence[Shares | float] = ()

    def time(self, op: MicroStep, half: Half) -> float:
        shape, again = op.stage.shape, self.again[op.stage.index]
        node = shape.nodes[op.node]
        if half is Half.RECOMPUTE and isinstance(again, float):
            return 0.0
        share, inside, repeats = again.get(node.name, _WHOLE) if isinstance(again, dict) else _WHOLE
        marked = replace(node, share=share, inside=inside, again=repeats)
        alone = StageShape((*shape.nodes[: op.node], marked, *shape.nodes[op.node + 1 :]), shape.outputs)
        time = self.costs.duration(alone, half, op.node)
        if half not in _HALVES or node.exchange:
            return time
        segments = [index for index, node in enumerate(shape.nodes) if not node.exchange]
        if half is Half.BACKWARD and isinstance(again, float) and op.node == segments[0]:
            time += again
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
    again: list[Shares | float],
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Emulated seconds of one step of a plan on this process: the end, and the seconds of compute.

    plan, costs: texts of the plan file and of its cost file. segments, exchanges: seconds by role. p2p: of a message.
    again: as `PlannedDevice`. sizes: rows of a microbatch, tokens of a row, width of the model, and how many of its
    layers are dense.
    """
    given = parse_costs(Source("plan.costs.toml", costs))
    program = schedc.compile(Text(Source("plan.sched", plan), "planned"), costs=given)
    attached = toy_plan(program.plan)
    mesh = mesh_for(attached, program, None)
    kind = "moe" if attached.experts else "gpt"
    subject = toy_model(kind, program, attached, Namespace(seed=0, blocks=None, **sizes))
    pipe = Pipeline(
        subject.model, program, loss_fn=subject.loss_fn, mesh=mesh, plan=attached,
        cells=given.cell.costs if given.cell else whole_op, cut=Cut(segmented=True), timeout=120,
    )  # fmt: skip
    times = {role: SegmentTimes(*each) for role, each in segments.items()}
    table = CellCosts.of(times, {name: SegmentTimes(*each) for name, each in exchanges.items()})
    device = PlannedDevice(
        table,
        1.0,
        SharedStarts.of_processes(mesh, rank),
        p2p,
        {"dp": ENDLESS},
        beside=_beside(program, times),
        again=again,
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


def whole_op(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """The serial order of a cell that waits for all messages first and sends at its end, as a stage in one piece."""
    program = serial(kind, forward, backward)
    leave = (at if at < 0 else len(program.steps) for at in (program.activation_at, program.gradient_at))
    return CellProgram(program.steps, *leave, kind, opens_late=False)


def _beside(program: Program, times: dict[str, SegmentTimes]) -> list[tuple[int, bool, SegmentTimes]]:
    """What first and last segments take more: an op in each stage, the embedding, the head."""
    ops = [(stage, False, times["op"]) for stage in range(program.stages)]
    return [*ops, (0, False, times["embedding"]), (program.stages - 1, True, times["head"])]
