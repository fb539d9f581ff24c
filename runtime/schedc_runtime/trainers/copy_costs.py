"""Says what copies of the state beside a step cost, from the measured time of a step and speed of a copy."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from schedc.ir.arrays import Floats
from schedc.ir.program import computation
from schedc.ir.works import WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_works import placed_in
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks
from schedc.step.works.place_snapshots import held_by_ranks, snapshot_price
from schedc.units import plain, shown
from schedc_runtime.device.base import ComputeDevice
from schedc_runtime.device.choice import device_for
from schedc_runtime.pipeline.pipeline import Pipeline

_PROBE = 64 << 20
"""Bytes of the copy that is measured."""


def copy_costs(pipe: Pipeline, sizes: Floats, seconds: float) -> str:
    """A line about the rank whose copies are exposed most. sizes: [stages] bytes. seconds: of a step.

    The cells of the step are priced at unit costs, scaled to its time.
    """
    assembly, program = pipe._assembly, pipe.program
    device = device_for(assembly.device)
    speed = measured_speed(device)
    dependencies = Dependencies.of(computation(program)[0])
    held = held_by_ranks(dependencies, sizes)
    step = f"a step takes {plain(seconds * 1e3, digits=3)} ms, and copies run at {shown(speed)}/s"
    if lacks := device.supports("streams"):
        most = float(held.sum(1).max())
        return f"{step}: {shown(most)} take {plain(most / speed * 1e3, digits=3)} ms of it, since {lacks}"
    cells = CellTimes.of(dependencies, Costs().resolved(program.stages))
    scale = seconds / cells.makespan
    times = {name: getattr(cells, name) * scale for name in ("duration", "start", "end", "latency")}
    moves = placed_in(program).of_kinds(WorkKind.OFFLOAD, WorkKind.FETCH)
    beside = StepWorks(moves, moves.works.bytes / speed, replace(cells, **times), True)
    price = snapshot_price(beside, held, 1 / speed)
    rank = int(np.argmax(price.exposed))
    fits, exposed = shown(float(price.fits[rank])), shown(float(price.exposed[rank]))
    return f"{step}: on rank {rank} {fits} fit beside compute, {exposed} are exposed"


def measured_speed(device: ComputeDevice) -> float:
    """Bytes per second of a copy from the device to the host, when nothing else runs there."""
    source = torch.ones(_PROBE, dtype=torch.uint8, device=device.where)
    target, taken = device.host_memory(_PROBE), list[float]()
    for _ in range(3):
        device.record().synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        device.record().synchronize()
        taken.append(time.perf_counter() - begin)
    return _PROBE / min(taken)
