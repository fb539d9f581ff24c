"""Runs steps that leave nothing behind, to say what a graph of a step cannot hold."""

from __future__ import annotations

from typing import Any

import torch

from schedc_runtime.capture.check import CaptureReport, capturable
from schedc_runtime.pipeline.agree.counts import Accumulation
from schedc_runtime.pipeline.step.call import PipelineCall
from schedc_runtime.pipeline.step.contexts import Undo
from schedc_runtime.pipeline.step.step import StepRunner

BatchAndTargets = tuple[Any, Any]
"""Batch and targets as of `Pipeline.step`, [rows, ...] each."""


def explained(runner: StepRunner, call: PipelineCall, first: BatchAndTargets, second: BatchAndTargets) -> CaptureReport:
    """What a graph of ``call`` cannot hold on this rank. A collective: the steps run on all ranks, and are undone.

    Undone are gradients, buffers, counts of layers, generators and the number of steps.
    """
    held = list(runner.assembly.held())
    undo = Undo([stage.module for stage in held], runner.layers, generators=True)
    before = runner.trained, runner.accumulation, runner.result, runner.hot.state()
    undo.begin(training=True)
    parameters = [each for stage in held for each in stage.module.parameters()]

    def step(number: int) -> None:
        for each in parameters:
            if each.grad is not None:
                each.grad.zero_()
        runner.accumulation = Accumulation()
        runner.run(call, *(second if number == 2 else first))

    try:
        with torch.enable_grad():
            return capturable(step)
    finally:
        undo.undo()
        undo.end()
        runner.trained, runner.accumulation, runner.result, hot = before
        runner.hot.load(hot)
