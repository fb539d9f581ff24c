"""Measures how much of the communication of expert layers a cell program hides, and compares it with the prediction.

    python benchmarks/overlap.py [--json] [--ratios 0.2,0.5,0.85] [--schedules zbh1] [--host 6] [--slices 2]

Instrument: emulated device time (`schedc_runtime.measure.emulated_device`). Segments and exchanges take the times of a
table. The collectives that run underneath are real and asynchronous, over gloo.

A step: four processes, a pipeline of two ranks, each an expert group of two, DualPipeV, a MoE transformer with a shared
expert. The table has the proportions of DeepSeek-V3's layer. Forward: attention 20, shared expert 6, experts 20.
Backward: experts 20 and their weights 26, attention 20 and its weights 18, shared expert 6. A ratio is the time of all
exchanges over the time of all segments. Printed for each ratio:

    hidden         1 - exposed / carried, over all ranks. exposed: seconds in which devices waited for exchanges.
                   carried: seconds that the exchanges took
    hidden_steady  hidden over the overlapped pairs alone
    hidden_step    hidden over the whole step. With a share s of the exchanges in pairs it is
                   s * hidden_steady + (1 - s) * hidden in warm-up and cool-down, where a stage has only its own shared
                   expert and weight gradients to compute meanwhile

The clocks of emulated devices do not depend on the load of the machine: every step of several takes as long, or the
benchmark ends with an error.

One block alone, without pairs: two processes, an expert group, one MoE block with a shared expert. Every microbatch has
an F and then a B = I + W (`1f1b` on one rank). The shared expert and the weight gradients of the experts take as long
as an exchange or a little longer (`BLOCK`). Printed:

    block_hidden           hidden over F and B of both ranks; block_hidden_forward, block_hidden_backward: of one alone
    block_split_hidden*    the same with I and W apart (`zbh1`): W runs when no exchange is in flight

Messages between stages: the step of the last ratio with three kinds of cells. The messages of `overlapped` cells leave
at the end of the cell, which waits for all of its messages before it begins. Messages of `early` cells leave early.
`inside` cells also wait late, as the runtime does. Printed:

    idle_*         seconds of a step in which a rank is idle between cells or waits for a message, the mean over ranks

With `--schedules` only steps of these schedules are measured, at each ratio. A zero-bubble schedule is followed by its
form with weight gradients in pairs, `F & W` (`WITH_PAIRS`). Printed for each ratio and schedule, by `--json` for the
last of them also at the top:

    step, predicted_step                 seconds, measured and as `schedc check` predicts them from the same table
    measured_over_predicted              the first over the second
    hidden_step, predicted_hidden_step   as above
    over_without, predicted_over_without the step with pairs over that of the schedule without them

With `--host T` besides, every copy of sizes to the host takes T units. `NAME, host` is the schedule whose cells start
and wait for the copies, `NAME, at once` that whose hosts stand still in `permute`. Their `over_without` is the step
over that without copies.

With `--slices K` besides, or alone for the schedules `IN_SLICES`, each schedule is followed by the same in K slices of
a microbatch. Their segments take `--dearer` times as long as those of the whole, 1.05 by default.

predicted_*, block_predicted* and block_split_predicted* are the same figures by `schedc.cell.predict`, cell by cell,
and by `schedc check`, from the same table.
"""

from __future__ import annotations

import argparse

from emulated_steps import (
    EVERY,
    EXPERT_RANKS,
    HOSTS,
    MESSAGES,
    PAIRED,
    RANKS,
    costs_at,
    hidden,
    in_slices,
    with_host,
)
from figures import give, parser_of

import schedc
from schedc.cell.slices import sliced
from schedc.cell.table import CellTable
from schedc.ir.program import InstructionKind, computation
from schedc.step.cells.cell_pricing import price
from schedc.step.dependencies import Dependencies
from schedc_runtime.testing import pool

BLOCK_SCHEDULES = {"block": "1f1b", "block_split": "zbh1"}
IN_SLICES = ("1f1b", "zbh1", "dualpipev")
"""The schedules whose steps are measured in slices where none are named."""
WITH_PAIRS = {"zbh1": "zbh1_overlap"}
"""Zero-bubble schedules, and the same with weight gradients in pairs."""
BLOCK_PARTS = {"_forward": (InstructionKind.F,), "_backward": (InstructionKind.B, InstructionKind.I), "": EVERY}


def measure(ratio: float, options: argparse.Namespace) -> dict[str, float]:
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "emulated_steps:rank_of_step", timeout=600, ratio=ratio, microbatches=options.microbatches,
        layers=options.layers, unit=options.unit * 1e-3, repetitions=options.repetitions,
    )  # fmt: skip
    measured, predicted = ([rank[name] for rank in ranks] for name in ("measured", "predicted"))
    carried = sum(pair[0] for table in measured for pair in table.values())
    paired = sum(table[kind.name][0] for table in measured for kind in PAIRED if kind.name in table)
    return {
        "comm_over_compute": carried / sum(rank["busy"] for rank in ranks),
        "hidden_steady": hidden(measured, PAIRED),
        "hidden_step": hidden(measured, EVERY),
        "predicted_steady": hidden(predicted, PAIRED),
        "predicted_step": hidden(predicted, EVERY),
        "share_in_pairs": paired / carried,
        "wall_s": max(rank["wall"] for rank in ranks),
        "compute_s": max(rank["busy"] for rank in ranks),
    }


def measure_messages(ratio: float, options: argparse.Namespace) -> dict[str, float]:
    """Steps and idle times by how cells treat their messages, measured and as `schedc check` predicts them."""
    dependencies = Dependencies.of(computation(schedc.compile("dualpipev", P=RANKS, M=options.microbatches))[0])
    costs, unit = costs_at(ratio), options.unit * 1e-3
    shapes = CellTable(costs, (("moe",) * options.layers,)).shapes(dependencies.schedule.stages)
    priced = price(dependencies, shapes, costs)
    spans = {"overlapped": priced.overlapped, "early": priced.early_send, "inside": priced.late_wait}
    figures: dict[str, float] = {}
    for name in MESSAGES:
        ranks = pool(RANKS * EXPERT_RANKS).run(
            "emulated_steps:rank_of_step", timeout=600, ratio=ratio, microbatches=options.microbatches,
            layers=options.layers, unit=unit, repetitions=options.repetitions, messages=name,
        )  # fmt: skip
        step = max(rank["wall"] for rank in ranks)
        figures[f"idle_{name}"] = step - sum(rank["busy"] + rank["blocked"] for rank in ranks) / len(ranks)
        figures[f"predicted_idle_{name}"] = priced.idle[name] * unit
        figures[f"step_{name}"] = step
        figures[f"predicted_step_{name}"] = spans[name].makespan * unit
    return figures


def measure_schedule(
    schedule: str, ratio: float, options: argparse.Namespace, host: tuple[str, float] = ("", 0.0), slices: int = 1
) -> dict[str, float]:
    """Steps of a schedule, measured and as `schedc check` predicts them. host: see `with_host`."""
    costs = in_slices(with_host(ratio, *host), slices, options.dearer)
    unit = options.unit * 1e-3
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "emulated_steps:rank_of_schedule", timeout=600, schedule=schedule, ratio=ratio, host=host,
        microbatches=options.microbatches, layers=options.layers, unit=unit, repetitions=options.repetitions,
        slices=(slices, options.dearer),
    )  # fmt: skip
    dependencies = Dependencies.of(computation(schedc.compile(schedule, P=RANKS, M=options.microbatches))[0])
    shapes = CellTable(costs, (("moe",) * options.layers,)).shapes(dependencies.schedule.stages)
    graphs = [sliced(shape, slices) for shape in shapes]
    step, predicted = max(rank["wall"] for rank in ranks), price(dependencies, graphs, costs)
    return {
        "step": step,
        "predicted_step": predicted.late_wait.makespan * unit,
        "measured_over_predicted": step / (predicted.late_wait.makespan * unit),
        "hidden_step": hidden([rank["measured"] for rank in ranks], EVERY),
        "predicted_hidden_step": predicted.hidden_step,
    }


def measure_schedules(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """By ratio and by schedule: `measure_schedule`, of a schedule with pairs or copies beside that without them."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for ratio in options.ratios.split(","):
        steps = results.setdefault(ratio, {})
        for name in options.schedules.split(","):
            steps[name] = measure_schedule(name, float(ratio), options)
            for title, (schedule, host, slices) in beside(name, options).items():
                steps[title] = measure_schedule(schedule, float(ratio), options, host, slices)
                for kind in ("", "predicted_"):
                    steps[title][f"{kind}over_without"] = steps[title][f"{kind}step"] / steps[name][f"{kind}step"]
    return results


def beside(name: str, options: argparse.Namespace) -> dict[str, tuple[str, tuple[str, float], int]]:
    """By title: what is measured beside a schedule. The schedule, its copies of sizes, and its slices."""
    nothing = "", 0.0
    if options.slices > 1:
        return {f"{name}, {options.slices} slices": (name, nothing, options.slices)}
    others = {paired: (paired, nothing, 1) for paired in (WITH_PAIRS.get(name),) if paired is not None}
    return others | {f"{name}, {how}": (name, (how, options.host), 1) for how in HOSTS if options.host}


def measure_block(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, schedule in BLOCK_SCHEDULES.items():
        ranks = pool(EXPERT_RANKS).run(
            "emulated_steps:rank_of_block", timeout=600, schedule=schedule, microbatches=options.microbatches,
            unit=options.unit * 1e-3, repetitions=options.repetitions,
        )  # fmt: skip
        for part, kinds in BLOCK_PARTS.items():
            figures[f"{name}_hidden{part}"] = hidden([rank["measured"] for rank in ranks], kinds)
            figures[f"{name}_predicted{part}"] = hidden([rank["predicted"] for rank in ranks], kinds)
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ratios", default="0.2,0.5,0.85", help="communication over compute, the last one reported")
    parser.add_argument("--schedules", default="", help="measure steps of these schedules alone: zbh1,1f1b")
    parser.add_argument("--host", type=float, default=0.0, help="units of a copy of sizes, with --schedules")
    parser.add_argument("--slices", type=int, default=1, help="slices of a microbatch; steps of `--schedules` alone")
    parser.add_argument("--dearer", type=float, default=1.05, help="time of segments in slices over that without")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="MoE blocks per stage")
    parser.add_argument("--repetitions", type=int, default=3, help="steps that are measured")
    parser.add_argument("--unit", type=float, default=1.0, help="milliseconds of one unit of the table of times")
    options = parser.parse_args()
    if options.slices > 1 and not options.schedules:
        options.schedules = ",".join(IN_SLICES)
    if options.schedules:
        by_ratio = measure_schedules(options)
        last = list(list(by_ratio.values())[-1].values())[-1]
        give({**last, "schedules": by_ratio}, options)
        return
    results = [measure(float(ratio), options) for ratio in options.ratios.split(",")]
    block = measure_block(options)
    messages = measure_messages(float(options.ratios.split(",")[-1]), options)
    give({**results[-1], **block, **messages, "ratios": results}, options)


if __name__ == "__main__":
    main()
