"""Section `capture`: whole steps with experts as one graph each, beside steps that launch. On a CPU a tape replays."""

from __future__ import annotations

import re
from typing import Any

import torch

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting, medians
from gpu.step import MODES, pipeline, stepping
from schedc_runtime import Pipeline
from schedc_runtime.pipeline.step.step_graphs import EAGER

CLAIMS = (
    Claim(
        "whole steps captured as a graph keep the bits of launched steps",
        "MoE blocks with a capacity of 1.25, steps of SGD until some have been replayed",
        (Bound("capture.same_bits", "==", True), Bound("capture.replayed", ">=", 1)),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "whole steps captured as a graph are no slower than launched steps",
        "the same blocks",
        (Bound("capture.speedup", ">=", 1.0),),
    ),
)

STEPS = EAGER + 4
"""The first steps launch, one is captured, and the last ones replay."""


def measure(setting: Setting) -> dict[str, Any]:
    pipes = {name: pipeline(setting, capacity=MODES["padded"], graphs=graphs) for name, graphs in
             (("launched", False), ("graph", "step"))}  # fmt: skip
    values = {name: trained(setting, pipe) for name, pipe in pipes.items()}
    told = re.search(r"replayed (\d+) times", pipes["graph"].report())
    entries: dict[str, Any] = {
        "same_bits": all(map(torch.equal, values["launched"], values["graph"])),
        "replayed": int(told[1]) if told else 0,
    }
    if not setting.gpu:
        return {"capture": entries | {"speedup": not_measured("a tape on a CPU replays no faster than it launches")}}
    times = medians(setting, {name: stepping(setting, pipe) for name, pipe in pipes.items()})
    return {"capture": entries | {"speedup": times["launched"] / times["graph"]}}


def trained(setting: Setting, pipe: Pipeline) -> list[torch.Tensor]:
    """The losses of some steps, and the parameters behind them."""
    step, losses = stepping(setting, pipe), []
    for _ in range(STEPS):
        losses.append(step())
        with torch.no_grad():
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [*losses, *(parameter.detach().clone() for parameter in pipe.parameters())]
