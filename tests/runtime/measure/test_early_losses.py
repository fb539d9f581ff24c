"""Steps whose outputs have losses in stages of their own take, in emulated device time, what `schedc check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

import schedc
from schedc.cell.costs import CellCosts
from schedc.cell.program import Half
from schedc.compiler import analyse
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, losses_of_outputs
from support.row_cases import at_the_ends
from support.sweeps import swept

CASES = [
    ("1f1b(P = 4, M = 6)", "Et|tm|L|L"),
    ("zbh1(P = 4, M = 6)", "Eet|t|mL|L"),
    ("interleaved_1f1b(P = 2, M = 4, v = 2)", "Eet|tm|L|L"),
    ("interleaved_1f1b(P = 2, M = 4, v = 3)", "Et|t|m|mL|L|L"),
]
"""Schedules, and layouts with a loss for each output."""
VOCAB = 24
_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)


@dataclass
class StageTimes(Device):
    """A device on which each op of a stage takes the time of its half, ``of_stages`` [halves][stages], in seconds."""

    of_stages: Sequence[Sequence[float]] = ()

    def time(self, op: MicroStep, half: Half) -> float:
        first = next(index for index, node in enumerate(op.stage.shape.nodes) if not node.exchange)
        return self.of_stages[_HALVES.index(half)][op.stage.index] if op.node == first else 0.0


def model(layout: str) -> MoETransformer:
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 2, "inner": 24, "query_rank": 8, "key_value_rank": 4, "plain": 4, "rotary": 4}
    layers, predictions = layout.count("t"), layout.count("m")
    return MoETransformer(MoEConfig(VOCAB, **sizes, dense_blocks=layers, moe_blocks=0, predictions=predictions))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "layout"), swept(CASES, CASES[::2]))
def test_emulated_steps_are_the_printed_ones(schedule: str, layout: str) -> None:
    text = f'plan p = {schedule} {{ layout "{layout}"  costs embedding 0.3 mtp 1.2 head 1.8 }}\n'
    costs = Costs(F=1.0, I=1.5, W=0.75, p2p=0.25)
    step = analyse(Text(Source("p.sched", text), "p"), {}, costs)
    program, losses = (
        schedc.compile(Text(Source("p.sched", text), "p"), costs=costs),
        losses_of_outputs(layout.count("m")),
    )
    pipe = Pipeline(model(layout), program, loss_fn=losses, cells=at_the_ends, cut=Cut(segmented=True), in_process=True)
    tokens = torch.arange(2 * program.microbatches * 6).view(-1, 6) % VOCAB
    pipe.step(tokens, tokens)  # binds
    resolved, mesh = step.costs.resolved(program.stages), Mesh(program.ranks)
    starts = SharedStarts.in_memory(mesh)
    devices = []
    for bound in pipe._bound_code._bound.values():
        for place, executor in bound.executors.items():
            times = [each.tolist() for each in (resolved.F, resolved.I, resolved.W)]
            devices.append(StageTimes(CellCosts(), 1.0, starts[mesh.process(place)], resolved.p2p, of_stages=times))
            executor.code = devices[-1].code(executor.code)
            devices[-1].begin()
    pipe.step(tokens, tokens)
    pipe.close()
    assert max(device.clock for device in devices) == pytest.approx(step.timeline.makespan)
