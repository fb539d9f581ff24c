"""Begins a watch of the speed of all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.speed.watch import SpeedWatch, check_watchable


def watch_speed(pipe: Pipeline, tell: Callable[[str], Any] = print) -> SpeedWatch:
    """Tell which ranks become slower than they were, by the processor time of all training steps from now on.

    Steps 11 to 70 with batches of a shape are the baseline. Behind every tenth step all ranks compare their times.
    tell: called on the first process, with a line for each rank that has become slow. A collective: all ranks must call
    it. Raises `RuntimeFault` where the time of a host says nothing: on a GPU, and with graphs of whole steps.
    """
    runner, assembly = pipe._runner, pipe._assembly
    check_watchable(assembly.device.type, graphs=runner.graphs is not None)
    with assembly.guard("beginning to watch the speed of ranks"):
        runner.control.gather("beginning to watch the speed of ranks", None)
    here = [assembly.mesh.name(place) for place in assembly.places]
    watch = SpeedWatch(runner.control, here if assembly.network.in_process else runner.control.names, tell)
    runner.watches = [*(other for other in runner.watches if not isinstance(other, SpeedWatch)), watch]
    return watch
