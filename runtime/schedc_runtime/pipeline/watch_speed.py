"""Begins a watch of the speed of all ranks of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.speed.details import MOST, StepDetails
from schedc_runtime.speed.ring import SUFFIX, StepRing
from schedc_runtime.speed.watch import SpeedWatch, check_watchable


def watch_speed(
    pipe: Pipeline,
    tell: Callable[[str], Any] = print,
    *,
    level: int = 0,
    folder: str | os.PathLike[str] | None = None,
) -> SpeedWatch:
    """Tell which ranks become slower than they were, by the processor time of all training steps from now on.

    Steps 11 to 70 with batches of a shape are the baseline. Behind every tenth step all ranks compare their times.
    tell: called on the first process, with a line for each rank that has become slow.

    level: 1 also keeps begin, end and processor time of each instruction of the last 32 steps. Each rank has a file for
    them in ``folder``, which outlives a killed process. A keeper brings files beside its images to disk. 2 also watches
    the latencies of messages from rank to rank. It keeps garbage collections, works of lanes, and rows of exchanges and
    of experts with each step.

    A collective: all ranks must call it. Raises `RuntimeFault` where the time of a host says nothing: on a GPU, and
    with graphs of whole steps.
    """
    runner, assembly = pipe._runner, pipe._assembly
    in_process = assembly.network.in_process
    check_watchable(assembly.device.type, runner.graphs is not None, level, folder, in_process)
    with assembly.guard("beginning to watch the speed of ranks"):
        runner.control.gather("beginning to watch the speed of ranks", None)
    for other in runner.watches:
        if isinstance(other, SpeedWatch):
            other.close()
    here = [assembly.mesh.name(place) for place in assembly.places]
    ring, details = None, None
    if level and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        ring = StepRing(Path(folder) / f"rank-{runner.control.process:04}{SUFFIX}", MOST if level == 2 else 0)
    if level == 2:
        layers = (
            (f"{index}.{name}", layer)
            for index, stage in assembly.stages[assembly.places[0]].items()
            for name, layer in moe_layers(stage.module)
        )
        details = StepDetails(assembly.lanes, layers)
    watch = SpeedWatch(
        runner.control, here if in_process else runner.control.names, tell, runner.trained, ring,
        assembly.places[0] if level == 2 else None, details,
    )  # fmt: skip
    runner.watches = [watch, *(other for other in runner.watches if not isinstance(other, SpeedWatch))]
    return watch
