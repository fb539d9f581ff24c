"""Measures how much of the communication of expert layers a cell program hides, and compares it with the prediction.

    python benchmarks/overlap.py [--json] [--ratios 0.2,0.5,0.85] [--schedules zbh1] [--host 6]

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

predicted_*, block_predicted* and block_split_predicted* are the same figures by `schedc.cell.predict`, cell by cell,
and by `schedc check`, from the same table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.analysis.cell_pricing import price
from schedc.analysis.dependencies import Dependencies
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.predict import predict
from schedc.cell.program import CellProgram
from schedc.cell.table import CellTable
from schedc.ir.program import Instruction, InstructionKind, Program, computation
from schedc.plan import Attachments
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.cell_programs import cell_source
from schedc_runtime.execute.executor import Executor
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.stages import new_stage, stages_on
from schedc_runtime.ranks.mesh import Mesh, peer_groups
from schedc_runtime.segments import SegmentedStage
from schedc_runtime.stage.stage import Stage
from schedc_runtime.testing import pool
from schedc_runtime.transport import TorchTransport

RANKS, EXPERT_RANKS = 2, 2
SEGMENTS = {
    "attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 0),
    "experts": SegmentTimes(20, 20, 26), "post": SegmentTimes(2, 2, 0),
}  # fmt: skip
"""Milliseconds of one layer. The shared expert's weight gradient counts with its backward."""
COMPUTE = sum(sum(times) for times in SEGMENTS.values())
ROUTING = 1.0
"""Milliseconds of the exchange of the routing, forward only."""
PAIRED = (InstructionKind.CELL,)
EVERY = tuple(InstructionKind)
BLOCK = CellCosts.of(
    {
        "attention": SegmentTimes(10, 10, 10),
        "shared": SegmentTimes(12, 12, 4),
        "experts": SegmentTimes(10, 10, 12),
        "post": SegmentTimes(2, 2, 0),
    },
    {"routing.node": SegmentTimes(ROUTING), "dispatch.node": 10, "combine.node": 10},
)
"""Milliseconds of one block alone."""
BLOCK_SCHEDULES = {"block": "1f1b", "block_split": "zbh1"}
WITH_PAIRS = {"zbh1": "zbh1_overlap"}
"""Zero-bubble schedules, and the same with weight gradients in pairs."""
BLOCK_PARTS = {"_forward": (InstructionKind.F,), "_backward": (InstructionKind.B, InstructionKind.I), "": EVERY}
OVERLAPPED = Attachments(overlap=True)


def costs_at(ratio: float) -> CellCosts:
    """Costs by which the exchanges of a layer, forward and backward, take ``ratio`` of the time of its segments."""
    rows = (ratio * COMPUTE - ROUTING) / 4
    return CellCosts.of(SEGMENTS, {"routing.node": SegmentTimes(ROUTING), "dispatch.node": rows, "combine.node": rows})


def in_cells(costs: CellCosts, trip: float) -> CellCosts:
    """Costs of cells that start and wait for copies of sizes. trip: the time of a copy."""
    return CellCosts.of(dict(costs.segments), {**dict(costs.exchanges), "sizes.host": trip})


def at_once(costs: CellCosts, trip: float) -> CellCosts:
    """Costs of cells whose hosts stand still for copies of sizes. trip: the time of a copy."""
    return CellCosts.of({**dict(costs.segments), "permute": SegmentTimes(trip)}, dict(costs.exchanges))


HOSTS = {"host": in_cells, "at once": at_once}
"""How cells treat copies of sizes, by its name."""


def with_host(ratio: float, how: str, trip: float) -> CellCosts:
    """`costs_at` with copies of sizes, each of ``trip``. how: of `HOSTS`; "" for none."""
    return HOSTS[how](costs_at(ratio), trip) if how else costs_at(ratio)


def at_the_ends(program: CellProgram) -> CellProgram:
    """The cell program whose messages leave at the end of the cell, which waits for all messages before it begins."""
    end = len(program.steps)
    marks = {name: end if getattr(program, name) >= 0 else -1 for name in ("activation_at", "gradient_at")}
    return replace(program, opens_late=False, **marks)


def opened_early(program: CellProgram) -> CellProgram:
    """The cell program whose messages leave early; the cell waits for all messages before it begins."""
    return replace(program, opens_late=False)


MESSAGES: dict[str, Callable[[CellProgram], CellProgram]] = {
    "overlapped": at_the_ends, "early": opened_early, "inside": lambda program: program,
}  # fmt: skip
"""How cells treat their messages, by its name in `schedc.analysis.cell_pricing.CellPricing.idle`."""


def rank_of_step(
    rank: int,
    world_size: int,
    ratio: float,
    microbatches: int,
    layers: int,
    unit: float,
    repetitions: int,
    messages: str = "inside",
) -> dict[str, Any]:
    """Steps of the pipeline on this process."""
    program = schedc.compile("dualpipev", P=RANKS, M=microbatches)
    return emulated(rank, program, Mesh(RANKS, EXPERT_RANKS), layers, costs_at(ratio), unit, repetitions, messages)


def rank_of_schedule(
    rank: int, world_size: int, schedule: str, ratio: float, host: tuple[str, float], microbatches: int, layers: int,
    unit: float, repetitions: int,
) -> dict[str, Any]:  # fmt: skip
    """Steps of a schedule of the library on this process."""
    program = schedc.compile(schedule, P=RANKS, M=microbatches)
    return emulated(rank, program, Mesh(RANKS, EXPERT_RANKS), layers, with_host(ratio, *host), unit, repetitions)


def rank_of_block(
    rank: int, world_size: int, schedule: str, microbatches: int, unit: float, repetitions: int
) -> dict[str, Any]:
    """Steps of one block on this process: a pipeline of one rank, one microbatch after the other."""
    program = schedc.compile(schedule, P=1, M=microbatches)
    return emulated(rank, program, Mesh(1, EXPERT_RANKS), 1, BLOCK, unit, repetitions)


def emulated(
    rank: int,
    program: Program,
    mesh: Mesh,
    layers: int,
    costs: CellCosts,
    unit: float,
    repetitions: int,
    messages: str = "inside",
    device_of: Callable[[CellCosts, float, SharedStarts], Device] = Device,
) -> dict[str, Any]:
    """Emulated steps on this process: carried and exposed seconds by kind of instruction, measured and predicted.

    device_of: makes the emulated device from costs, the seconds of a unit, and the starts of all ranks.
    """
    place = mesh.coordinate(rank)
    groups = [dist.new_group(processes) for processes in mesh.pipelines()]
    near = peer_groups(mesh, place, 60.0)
    torch.manual_seed(0)
    parts = partition(model_of(layers * program.stages), program.stages, placement=program.placement)
    tokens = torch.randint(0, 32, (program.microbatches, 1, 8))
    boundaries = infer_boundaries(parts, (tokens[0],))
    held: dict[int, Stage] = {}
    for index in stages_on(program, place.pipeline):
        shard_experts(parts.modules[index], near.experts, host_lane=costs.asks_host)
        held[index] = new_stage(parts, index, parts.modules[index], program, token_loss)
        held[index].bind(boundaries[index], boundaries[index + 1])
    device = device_of(costs, unit, SharedStarts.of_processes(mesh, rank))
    ordered = cell_source(OVERLAPPED, costs)

    def cells(*cell: Any) -> CellProgram:
        return MESSAGES[messages](ordered(*cell))

    code = device.code(bind(program, place.pipeline, held, boundaries, cells=cells))
    executor = Executor(program, code, TorchTransport(groups[place.replica], 60.0), torch.device("cpu"))
    steps: list[float] = []
    for _ in range(repetitions):
        executor.start([(x,) for x in tokens], list(tokens), 1 / program.microbatches, probing=False)
        dist.barrier()
        device.begin()
        executor.advance()
        executor.finish()
        steps.append(device.clock)
    if max(steps) - min(steps) > 1e-9 * max(steps):
        raise SystemExit(
            f"steps of {min(steps)} and {max(steps)} s: the order of the runtime differs from step to step"
        )
    measured: dict[str, list[float]] = {}
    for row, spent in device.spent.items():
        _add(measured, InstructionKind(int(program.kind[row])).name, spent.carried, spent.waiting + spent.exposed)
    predicted = predictions(program, place.pipeline, held, costs, unit)
    blocked = sum(x.waiting + x.exposed for x in device.spent.values())
    return {"measured": measured, "predicted": predicted, "wall": device.clock, "busy": device.busy, "blocked": blocked}


def _add(total: dict[str, list[float]], kind: str, carried: float, exposed: float) -> None:
    so_far = total.get(kind, (0.0, 0.0))
    total[kind] = [so_far[0] + carried, so_far[1] + exposed]


def model_of(layers: int) -> MoETransformer:
    narrow = {"width": 8, "heads": 2, "inner": 8, "expert_inner": 4, "query_rank": 4, "key_value_rank": 4}
    config = MoEConfig(
        vocab=32,
        dense_blocks=0,
        moe_blocks=layers,
        plain=4,
        rotary=2,
        value=4,
        routing=RouterConfig(experts=8, top=2),
        **narrow,
    )
    return MoETransformer(config)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def predictions(
    program: Program, rank: int, held: dict[int, Stage], costs: CellCosts, unit: float
) -> dict[str, list[float]]:
    """Carried and exposed seconds of this rank's instructions by kind, as `predict` gives them."""
    total: dict[str, list[float]] = {}
    cells = cell_source(OVERLAPPED, costs)
    for x in program.instructions(rank):
        if x.kind > InstructionKind.CELL:
            continue
        kind, forward, backward = halves(x, held)
        prediction = predict(cells(kind, forward, backward), forward, backward, costs)
        _add(total, x.kind.name, prediction.communication * unit, prediction.exposed * unit)
    return total


def halves(x: Instruction, held: dict[int, Stage]) -> tuple[str, StageShape | None, StageShape | None]:
    """The kind of an instruction's cell, and the graphs of its stages."""

    def shape(stage: int) -> StageShape:
        segmented = held[stage]
        assert isinstance(segmented, SegmentedStage)
        return segmented.shape

    if x.kind is InstructionKind.CELL:
        return x.kind_name, shape(x.stage), shape(x.stage2)
    if x.kind is InstructionKind.F:
        return "F", shape(x.stage), None
    return x.kind.name, None, shape(x.stage)


def hidden(tables: list[dict[str, list[float]]], kinds: tuple[InstructionKind, ...]) -> float:
    """1 - exposed / carried, over all ranks and these kinds of instructions."""
    names = {kind.name for kind in kinds}
    pairs = [pair for table in tables for name, pair in table.items() if name in names]
    carried, exposed = (sum(column) for column in zip(*pairs, strict=True))
    return 1 - exposed / carried


def measure(ratio: float, options: argparse.Namespace) -> dict[str, float]:
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "overlap:rank_of_step", timeout=600, ratio=ratio, microbatches=options.microbatches, layers=options.layers,
        unit=options.unit * 1e-3, repetitions=options.repetitions,
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
            "overlap:rank_of_step", timeout=600, ratio=ratio, microbatches=options.microbatches, layers=options.layers,
            unit=unit, repetitions=options.repetitions, messages=name,
        )  # fmt: skip
        step = max(rank["wall"] for rank in ranks)
        figures[f"idle_{name}"] = step - sum(rank["busy"] + rank["blocked"] for rank in ranks) / len(ranks)
        figures[f"predicted_idle_{name}"] = priced.idle[name] * unit
        figures[f"step_{name}"] = step
        figures[f"predicted_step_{name}"] = spans[name].makespan * unit
    return figures


def measure_schedule(
    schedule: str, ratio: float, options: argparse.Namespace, host: tuple[str, float] = ("", 0.0)
) -> dict[str, float]:
    """Steps of a schedule, measured and as `schedc check` predicts them. host: see `with_host`."""
    costs = with_host(ratio, *host)
    unit = options.unit * 1e-3
    ranks = pool(RANKS * EXPERT_RANKS).run(
        "overlap:rank_of_schedule", timeout=600, schedule=schedule, ratio=ratio, host=host,
        microbatches=options.microbatches, layers=options.layers, unit=unit, repetitions=options.repetitions,
    )  # fmt: skip
    dependencies = Dependencies.of(computation(schedc.compile(schedule, P=RANKS, M=options.microbatches))[0])
    shapes = CellTable(costs, (("moe",) * options.layers,)).shapes(dependencies.schedule.stages)
    step, predicted = max(rank["wall"] for rank in ranks), price(dependencies, shapes, costs)
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
            others = {paired: (paired, ("", 0.0)) for paired in (WITH_PAIRS.get(name),) if paired is not None}
            others |= {f"{name}, {how}": (name, (how, options.host)) for how in HOSTS if options.host}
            for title, (schedule, host) in others.items():
                steps[title] = measure_schedule(schedule, float(ratio), options, host)
                for kind in ("", "predicted_"):
                    steps[title][f"{kind}over_without"] = steps[title][f"{kind}step"] / steps[name][f"{kind}step"]
    return results


def print_schedules(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """The figures of `measure_schedules` as a table."""
    titles = f"{'comm/compute':>12} {'schedule':>20} {'step':>8} {'predicted':>10}"
    print(f"{titles} {'ratio':>6} {'hidden':>9} {'predicted':>10}")
    for ratio, schedules in results.items():
        for name, x in schedules.items():
            columns = [x["hidden_step"], x["predicted_hidden_step"]]
            times = f"{x['step']:8.3f} {x['predicted_step']:10.3f} {x['measured_over_predicted']:6.3f}"
            print(f"{ratio:>12} {name:>20} {times} {shares(columns)}")


def measure_block(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, schedule in BLOCK_SCHEDULES.items():
        ranks = pool(EXPERT_RANKS).run(
            "overlap:rank_of_block", timeout=600, schedule=schedule, microbatches=options.microbatches,
            unit=options.unit * 1e-3, repetitions=options.repetitions,
        )  # fmt: skip
        for part, kinds in BLOCK_PARTS.items():
            figures[f"{name}_hidden{part}"] = hidden([rank["measured"] for rank in ranks], kinds)
            figures[f"{name}_predicted{part}"] = hidden([rank["predicted"] for rank in ranks], kinds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="How much communication cells hide, in emulated device time.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--ratios", default="0.2,0.5,0.85", help="communication over compute, the last one reported")
    parser.add_argument("--schedules", default="", help="measure steps of these schedules alone: zbh1,1f1b")
    parser.add_argument("--host", type=float, default=0.0, help="units of a copy of sizes, with --schedules")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="MoE blocks per stage")
    parser.add_argument("--repetitions", type=int, default=3, help="steps that are measured")
    parser.add_argument("--unit", type=float, default=1.0, help="milliseconds of one unit of the table of times")
    options = parser.parse_args()
    if options.schedules:
        by_ratio = measure_schedules(options)
        if options.json:
            last = list(list(by_ratio.values())[-1].values())[-1]
            print(json.dumps({**last, "schedules": by_ratio}))
        else:
            print_schedules(by_ratio)
        return
    results = [measure(float(ratio), options) for ratio in options.ratios.split(",")]
    block = measure_block(options)
    messages = measure_messages(float(options.ratios.split(",")[-1]), options)
    if options.json:
        print(json.dumps({**results[-1], **block, **messages, "ratios": results}))
        return
    print("emulated device time, 2 pipeline x 2 expert ranks over gloo; hidden = 1 - exposed / carried")
    print(
        f"{'comm/compute':>12} {'in pairs':>9} {'predicted':>10} {'step':>9} {'predicted':>10} {'share in pairs':>15}"
    )
    for x in results:
        columns = [x[name] for name in ("hidden_steady", "predicted_steady", "hidden_step", "predicted_step")]
        print(f"{x['comm_over_compute']:12.2f} {shares(columns)} {100 * x['share_in_pairs']:14.1f}%")
    print("one MoE block alone, 2 expert ranks")
    print(f"{'':>12} {'forward':>9} {'predicted':>10} {'backward':>9} {'predicted':>10} {'both':>9} {'predicted':>10}")
    for name, cells in (("block", "F, B = I + W"), ("block_split", "F, I, W")):
        columns = [block[f"{name}_{how}{part}"] for part in BLOCK_PARTS for how in ("hidden", "predicted")]
        print(f"{cells:>12} " + shares(columns))
    print("messages between stages, in seconds")
    print(f"{'':>12} {'step':>9} {'predicted':>10} {'idle':>9} {'predicted':>10}")
    for name in MESSAGES:
        values = [messages[f"{how}{what}_{name}"] for what in ("step", "idle") for how in ("", "predicted_")]
        print(f"{name:>12} " + " ".join(f"{value:{10 if i % 2 else 9}.3f}" for i, value in enumerate(values)))


def shares(columns: list[float]) -> str:
    """Shares measured and predicted, in turn, as columns."""
    return " ".join(f"{100 * value:{9 if at % 2 else 8}.1f}%" for at, value in enumerate(columns))


if __name__ == "__main__":
    main()
