"""Runs steps in emulated device time on every process of a pool, for `overlap.py` and others: the rank's side of it.

A pipeline of two ranks, each an expert group of two, or one MoE block alone. Segments and exchanges take the times of a
table (`schedc_runtime.measure.emulated_device`); the collectives underneath are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes, SliceFactor
from schedc.cell.graph import StageShape
from schedc.cell.predict import predict
from schedc.cell.program import CellProgram
from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.plan import Plan
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.cell_programs import cell_source
from schedc_runtime.execute.executor import Executor
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import Partition, partition
from schedc_runtime.pipeline.build.bound import bind_stage, record_in_slices
from schedc_runtime.pipeline.build.stages import new_stage, stages_on
from schedc_runtime.ranks.mesh import Mesh, PeerGroups, peer_groups
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.distributed import TorchTransport

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


def in_slices(costs: CellCosts, slices: int, dearer: float) -> CellCosts:
    """Costs by which the segments of so many slices take ``dearer`` times the time of the whole microbatch."""
    return replace(costs, slices=(SliceFactor(slices, dearer),)) if slices > 1 else costs


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
"""How cells treat their messages, by its name in `schedc.step.cells.cell_pricing.CellPricing.idle`."""


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
    unit: float, repetitions: int, slices: tuple[int, float] = (1, 1.0),
) -> dict[str, Any]:  # fmt: skip
    """Steps of a schedule of the library on this process."""
    program = schedc.compile(schedule, P=RANKS, M=microbatches)
    costs = in_slices(with_host(ratio, *host), *slices)
    return emulated(rank, program, Mesh(RANKS, EXPERT_RANKS), layers, costs, unit, repetitions, slices=slices[0])


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
    slices: int = 1,
    parts_of: Callable[[int, Program, PeerGroups], Partition] | None = None,
) -> dict[str, Any]:
    """Emulated steps on this process: carried and exposed seconds by kind of instruction, measured and predicted.

    device_of: makes the emulated device from costs, the seconds of a unit, and the starts of all ranks. slices: of a
    microbatch, in every stage. parts_of: cuts a model of so many layers, by default one with experts.
    """
    place = mesh.coordinate(rank)
    groups = [dist.new_group(processes) for processes in mesh.pipelines()]
    near = peer_groups(mesh, place, 60.0)
    torch.manual_seed(0)
    parts = (parts_of or _with_experts)(layers * program.stages, program, near)
    tokens = torch.randint(0, 32, (program.microbatches, slices, 8))
    plan = Plan(overlap=True, slices=(slices,) * program.stages if slices > 1 else ())
    record = record_in_slices(parts, (tokens[0],), {}, plan.slices, training=True)
    parts.records.select(record)
    boundaries = record.boundaries
    held: dict[int, Stage] = {}
    for index in stages_on(program, place.pipeline):
        shard_experts(parts.modules[index], near.experts, host_lane=costs.asks_host)
        held[index] = new_stage(parts, index, parts.modules[index], program, token_loss, slices=plan.slices)
        bind_stage(held[index], record)
    device = device_of(costs, unit, SharedStarts.of_processes(mesh, rank))
    ordered = cell_source(plan, costs)

    def cells(*cell: Any) -> CellProgram:
        return MESSAGES[messages](ordered(*cell))

    code = device.code(bind(program, place.pipeline, held, boundaries, cells=cells))
    executor = Executor(program, code, TorchTransport(groups[mesh.peer(place)], 60.0), torch.device("cpu"))
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
    predicted = predictions(program, place.pipeline, held, ordered, costs, unit)
    blocked = sum(x.waiting + x.exposed for x in device.spent.values())
    return {"measured": measured, "predicted": predicted, "wall": device.clock, "busy": device.busy, "blocked": blocked}


def _add(total: dict[str, list[float]], kind: str, carried: float, exposed: float) -> None:
    so_far = total.get(kind, (0.0, 0.0))
    total[kind] = [so_far[0] + carried, so_far[1] + exposed]


def _with_experts(layers: int, program: Program, _: PeerGroups) -> Partition:
    return partition(model_of(layers), program.stages, placement=program.placement)


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
    program: Program, rank: int, held: dict[int, Stage], cells: CellSource, costs: CellCosts, unit: float
) -> dict[str, list[float]]:
    """Carried and exposed seconds of this rank's instructions by kind, as `predict` gives them."""
    total: dict[str, list[float]] = {}
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
        known = held[stage].shape
        assert known is not None
        return known

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
