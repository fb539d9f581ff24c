"""Compares steps of ranks with different numbers of rows with their predictions, in step and without.

    python benchmarks/imbalance.py [--json] [--schedules dualpipev,interleaved_overlap] [--ratio 0.85]

Instrument: emulated device time (`schedc_runtime.measure.emulated_device`). An exchange begins when the last of its
ranks has started it (`schedc_runtime.measure.shared_starts`). Collectives underneath are real, over gloo.

A step: four processes, a pipeline of two ranks, each an expert group of two. Model and times of a layer come from
benchmarks/overlap.py, with exchanges of ``--ratio`` of the compute. Experts, dispatch and combine take the time of
their rank's rows; an exchange takes that of the fuller rank. The two ranks have 1 and 1 times the rows, 1.25 and 0.75,
1.5 and 0.5, and 2 and 1. The second and third case also run with the fuller rank drawn for every layer and microbatch.

Predicted: `schedc.step.cells.cell_pricing.price` from the same table, with the ranks in step. Printed for each case,
and the largest of all cases:

    step_error            |measured step / predicted - 1|; the shortest of the steps counts
    even_error            the same against the prediction that takes all ranks for equal
    hidden_pairs_error    |measured - predicted| share of the exchanges of overlapped pairs that is hidden
    waiting, exposed      seconds of a rank, the mean, measured and predicted: standing for the fuller rank, and while
                          the link carries an exchange
    adds_up               |waiting + exposed - still| / still, where ``still`` is the time from a step's begin to the
                          end of its last segment or wait, less compute and waits for messages between stages
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from emulated_steps import EXPERT_RANKS, RANKS, costs_at, emulated
from figures import give, parser_of

import schedc
from schedc.cell.costs import OF_ROWS, CellCosts
from schedc.cell.program import Half
from schedc.cell.table import CellTable
from schedc.ir.arrays import Floats
from schedc.ir.program import InstructionKind, computation
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.group_pricing import RankRows
from schedc.step.dependencies import Dependencies
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.testing import pool

CASES = {
    "1, 1": (1.0, 1.0, False),
    "1.25, 0.75": (1.25, 0.75, False),
    "1.5, 0.5": (1.5, 0.5, False),
    "2, 1": (2.0, 1.0, False),
    "1.25, 0.75 changing": (1.25, 0.75, True),
    "1.5, 0.5 changing": (1.5, 0.5, True),
}
"""Rows of the two ranks over the mean, and whether the fuller one is drawn for every layer and microbatch."""


def factors_of(case: str, layers: int, microbatches: int) -> Floats:
    """[layers or 1, microbatches or 1, ranks] factors of a case."""
    first, second, changing = CASES[case]
    if not changing:
        return np.array([[[first, second]]])
    draw = random.Random(1)
    pair = (first, second)
    return np.array([[pair if draw.random() < 0.5 else pair[::-1] for _ in range(microbatches)] for _ in range(layers)])


@dataclass
class DeviceWithRows(Device):
    """factors: [layers or 1, microbatches or 1] rows of this rank over the mean. layers: those of a stage."""

    factors: Floats | None = None
    layers: int = 1

    def time(self, op: MicroStep, half: Half) -> float:
        assert self.factors is not None
        node = op.stage.shape.nodes[op.node]
        if node.role not in OF_ROWS:
            return super().time(op, half)
        layer, microbatch = op.stage.index * self.layers + node.layer, op.microbatch
        layers, microbatches = self.factors.shape
        return super().time(op, half) * float(self.factors[layer % layers, microbatch % microbatches])

    def figures(self, pairs: frozenset[int]) -> dict[str, float]:
        """Seconds of the step so far. pairs: rows of the program that are overlapped pairs."""
        spent = list(self.spent.items())
        return {
            "step": self.clock,
            "still": self.clock - self.busy - self.messages,
            "exposed": sum(x.exposed for _, x in spent),
            "waiting": sum(x.waiting for _, x in spent),
            "carried_pairs": sum(x.carried for row, x in spent if row in pairs),
            "exposed_pairs": sum(x.exposed for row, x in spent if row in pairs),
        }


def rank_of_case(
    rank: int, world_size: int, schedule: str, rows: str, ratio: float, microbatches: int, layers: int, unit: float,
    repetitions: int,
) -> list[dict[str, float]]:  # fmt: skip
    """[repetitions] figures of the steps on this process, in seconds."""
    mesh, program = Mesh(RANKS, EXPERT_RANKS), schedc.compile(schedule, P=RANKS, M=microbatches)
    factors = factors_of(rows, layers * program.stages, microbatches)[:, :, mesh.coordinate(rank).replica]
    pairs = frozenset(np.flatnonzero(program.kind == InstructionKind.CELL).tolist())
    steps: list[dict[str, float]] = []

    class RecordedDevice(DeviceWithRows):
        def begin(self) -> None:
            if self.clock:
                steps.append(self.figures(pairs))
            super().begin()

    devices: list[DeviceWithRows] = []

    def device_of(costs: CellCosts, unit: float, starts: SharedStarts) -> Device:
        devices.append(RecordedDevice(costs, unit, starts, factors=factors, layers=layers))
        return devices[-1]

    emulated(rank, program, mesh, layers, costs_at(ratio), unit, repetitions, device_of=device_of)
    return [*steps, devices[0].figures(pairs)]


def prediction(schedule: str, case: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a step, in seconds; ``even``: the step if all ranks were equal."""
    program = schedc.compile(schedule, P=RANKS, M=options.microbatches)
    dependencies = Dependencies.of(computation(program)[0])
    costs = costs_at(options.ratio)
    shapes = CellTable(costs, (("moe",) * options.layers,)).shapes(program.stages)
    factors = factors_of(case, options.layers * program.stages, options.microbatches)
    even, in_step = (price(dependencies, shapes, costs, group=x) for x in (None, RankRows(factors, shapes)))
    assert in_step.group is not None
    unit = options.unit * 1e-3
    waiting, exposed = (float(in_step.group.by_rank[name].mean()) / RANKS * unit for name in ("waiting", "exposed"))
    return {
        "step": in_step.late_wait.makespan * unit,
        "even": even.late_wait.makespan * unit,
        "waiting": waiting,
        "exposed": exposed,
        "hidden_pairs": in_step.hidden_steady or 0.0,
    }


def measured(schedule: str, case: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of the shortest step, in seconds: the mean over ranks, and of ``step`` the largest."""
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "imbalance:rank_of_case", timeout=600, schedule=schedule, rows=case, ratio=options.ratio,
        microbatches=options.microbatches, layers=options.layers, unit=options.unit * 1e-3,
        repetitions=options.repetitions,
    )  # fmt: skip
    steps = [{name: [rank[name] for rank in step] for name in step[0]} for step in zip(*ranks, strict=True)]
    shortest = min(steps, key=lambda step: max(step["step"]))
    means = {name: sum(values) / len(values) for name, values in shortest.items()}
    columns = (shortest[name] for name in ("waiting", "exposed", "still"))
    errors = [abs(waiting + exposed - still) / still for waiting, exposed, still in zip(*columns, strict=True)]
    hidden = 1 - means["exposed_pairs"] / means["carried_pairs"] if means["carried_pairs"] else 0.0
    return {
        "step": max(shortest["step"]),
        "waiting": means["waiting"],
        "exposed": means["exposed"],
        "hidden_pairs": hidden,
        "adds_up": max(errors),
    }


def case_of(schedule: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    predicted, run = prediction(schedule, case, options), measured(schedule, case, options)
    return {
        "schedule": schedule,
        "rows": case,
        "step_error": abs(run["step"] / predicted["step"] - 1),
        "even_error": abs(run["step"] / predicted["even"] - 1),
        "hidden_pairs_error": abs(run["hidden_pairs"] - predicted["hidden_pairs"]),
        "adds_up": run["adds_up"],
        "measured": run,
        "predicted": predicted,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedules", default="dualpipev,interleaved_overlap")
    parser.add_argument("--cases", default=";".join(CASES), help="some of the cases, with semicolons between")
    parser.add_argument("--ratio", type=float, default=0.85, help="time of all exchanges over that of all segments")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1, help="MoE blocks per stage")
    parser.add_argument("--repetitions", type=int, default=3, help="steps that are measured")
    parser.add_argument("--unit", type=float, default=1.0, help="milliseconds of one unit of the table of times")
    options = parser.parse_args()
    cases = [
        case_of(schedule, case, options)
        for schedule in options.schedules.split(",")
        for case in options.cases.split(";")
    ]
    worst = {
        f"{name}_max": max(case[name] for case in cases)
        for name in ("step_error", "even_error", "hidden_pairs_error", "adds_up")
    }
    give({**worst, "cases": cases}, options)


if __name__ == "__main__":
    main()
