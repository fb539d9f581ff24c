"""Pipelines of segmented stages for tests: models, random legal orders inside cells, and expert groups, in one process
or in many."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Half
from schedc.cell.schedule import cell_program
from schedc.cell.serial import serial
from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.executor import Executor, Interval, run_together
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.counts import Method
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.moe.sizes import CopiedSizes, Sizes
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.build.apply_plan import recompute_stages
from schedc_runtime.pipeline.build.stages import new_stage, stages_on
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups, in_process_peer_groups, peer_groups
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.base import Transport
from schedc_runtime.transport.distributed import TorchTransport
from schedc_runtime.transport.in_process import InProcessNetwork
from support.reference_runs import spread
from support.runtime_cases import next_token_loss, tokens

COSTS = CellCosts.of(
    {
        "attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 4),
        "experts": SegmentTimes(20, 20, 26), "post": SegmentTimes(2, 2, 0),
        "dense": SegmentTimes(30, 30, 20), "permute": SegmentTimes(1, 1, 0),
        "relay": SegmentTimes(1, 1, 0), "relay_back": SegmentTimes(1, 1, 0),
    },
    {f"{label}.{lane}": 9 for label in ("routing", "dispatch", "combine") for lane in ("rail", "node")}
    | {"sizes.host": 9},
)  # fmt: skip


def listed(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """List scheduling under `COSTS`."""
    return cell_program(kind, forward, backward, COSTS)


def shuffled(seed: int) -> CellSource:
    """Any legal order of the micro-steps of each cell, the same on every rank."""

    def source(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
        names = [shape.names if shape else () for shape in (forward, backward)]
        return _shuffled(random.Random(repr((seed, kind, names))), kind, forward, backward)

    return source


def _shuffled(choose: random.Random, kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    needs: dict[CellStep, list[CellStep]] = {}

    def add(half: Half, shape: StageShape, node: int, after: Sequence[CellStep]) -> None:
        if shape.nodes[node].exchange:
            needs[CellStep(Action.START, half, node)] = list(after)
            after = [CellStep(Action.START, half, node)]
        needs[_done(half, shape, node)] = list(after)

    ends: list[list[CellStep]] = [[], []]
    if forward is not None and kind[0] == "F":
        for node, what in enumerate(forward.nodes):
            add(Half.FORWARD, forward, node, [_done(Half.FORWARD, forward, needed) for needed in what.after])
        ends[0] = [_done(Half.FORWARD, forward, node) for node in forward.outputs]
    if backward is not None and kind == "R":
        for node in backward.recomputed:
            again = [needed for needed in backward.nodes[node].after if needed in backward.recomputed]
            add(Half.RECOMPUTE, backward, node, [_done(Half.RECOMPUTE, backward, needed) for needed in again])
    weights, backward = backward, forward if kind == "IW" else backward
    if backward is not None and kind not in ("W", "R", "FW"):
        for node in reversed(backward.backward):
            users = [user for user in backward.consumers[node] if user in backward.backward]
            users += _slice_before(backward, node, backward.backward)
            add(Half.BACKWARD, backward, node, [_done(Half.BACKWARD, backward, user) for user in users])
        ends[1] = [_done(Half.BACKWARD, backward, user) for user in backward.backward if backward.nodes[user].inputs]
    if weights is not None and kind[-1] in "BW":
        for node in weights.weights:
            before = [_done(Half.WEIGHT, weights, earlier) for earlier in _slice_before(weights, node, weights.weights)]
            if weights.nodes[node].exchange:
                takers = [user for user in weights.consumers[node] if user in weights.weights]
                add(Half.WEIGHT, weights, node, [_done(Half.WEIGHT, weights, user) for user in takers])
                continue
            own = [_done(Half.BACKWARD, weights, node)] if "B" in kind else []
            needs[CellStep(Action.RUN, Half.WEIGHT, node)] = own + before
    steps: list[CellStep] = []
    priority = {step: choose.random() for step in needs}
    while needs:
        steps.append(min((s for s, after in needs.items() if not any(x in needs for x in after)), key=priority.get))
        del needs[steps[-1]]
    sent_after = [max([steps.index(step) + 1 for step in wanted], default=-1) for wanted in ends]
    return CellProgram(steps=tuple(steps), activation_at=sent_after[0], gradient_at=sent_after[1], kind=kind)


def _slice_before(shape: StageShape, node: int, among: Sequence[int]) -> list[int]:
    """The same segment for the slice before, whose gradients come first."""
    own = shape.nodes[node]
    return [] if own.exchange or own.behind not in among else [own.behind]


def _done(half: Half, shape: StageShape, node: int) -> CellStep:
    return CellStep(Action.WAIT if shape.nodes[node].exchange else Action.RUN, half, node)


def small_moe(moe_blocks: int = 3, dense_blocks: int = 1, **options: Any) -> MoETransformer:
    """The same weights on every rank, in float64, without an auxiliary loss."""
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "inner": 8, "expert_inner": 4, "query_rank": 4, "key_value_rank": 4}
    narrow = {"plain": 4, "rotary": 2, "value": 4, "routing": RouterConfig(experts=8, top=2)}
    config = MoEConfig(vocab=32, dense_blocks=dense_blocks, moe_blocks=moe_blocks, **{**sizes, **narrow, **options})
    return MoETransformer(config).double()


class Ranks:
    """Some or all ranks of a pipeline whose replicas share their experts, each with a batch of its own."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        places: Mapping[Coordinate, tuple[PeerGroups, Transport]],
        cells: CellSource,
        method: Method = "flat",
        host_lane: bool = False,
    ) -> None:
        parts = partition(model, program.stages, placement=program.placement)
        self.program, self.count = program, program.microbatches
        example = tokens(1)[0]
        boundaries = infer_boundaries(parts, (example,))
        self.stages: dict[Coordinate, dict[int, Stage]] = {}
        self.executors: dict[Coordinate, Executor] = {}
        for place, (near, transport) in places.items():
            modules = copy.deepcopy({index: parts.modules[index] for index in stages_on(program, place.pipeline)})
            held: dict[int, Any] = {}
            for index, module in modules.items():
                shard_experts(module, near.experts, method, host_lane=host_lane)
                for part in module.modules():
                    if isinstance(part, Exchange) and part.group.size == 1:
                        part.group = near.experts
                held[index] = new_stage(parts, index, module, program, next_token_loss)
                held[index].bind(boundaries[index], boundaries[index + 1])
            recompute_stages([held], Plan(), program)
            self.stages[place] = held
            code = bind(program, place.pipeline, held, boundaries, cells=cells)
            self.executors[place] = Executor(program, code, transport, torch.device("cpu"))

    def step(self, trace: bool = False) -> None:
        for place, executor in self.executors.items():
            batch, targets = tokens(self.count, seed=place.replica + 1)
            executor.start([(x,) for x in batch.split(1)], targets.split(1), 1 / self.count, trace=trace)
        if len(self.executors) == 1:
            (executor,) = self.executors.values()
            assert executor.advance()
        else:
            run_together(list(self.executors.values()))
        for place, executor in self.executors.items():
            assert executor.registers.leftovers() == []
            for stage in self.stages[place].values():
                stage.check_empty()

    def results(self) -> dict[Coordinate, dict[str, Tensor]]:
        """Gradients by name and losses, of every place."""
        of_places = {}
        for place, held in self.stages.items():
            named = {name: p.grad for stage in held.values() for name, p in stage.module.named_parameters()}
            named |= {f"loss {m}": loss for stage in held.values() for m, loss in stage.take_losses().items()}
            of_places[place] = {name: value for name, value in named.items() if value is not None}
        return of_places


def together(
    mesh: Mesh, model: nn.Module, program: Program, cells: CellSource, method: Method = "flat", host_lane: bool = False
) -> Ranks:
    """All ranks of a mesh in this process."""
    near = in_process_peer_groups(mesh)
    networks = [InProcessNetwork(mesh.pipeline) for _ in range(mesh.replicas)]
    places = {place: (near[place], networks[place.replica].transport(place.pipeline)) for place in near}
    return Ranks(model, program, places, cells, method, host_lane)


def unequal(mine: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of what is not bitwise as expected."""
    return sorted(
        name for name in {*mine, *expected}
        if name not in mine or name not in expected or not torch.equal(mine[name], expected[name])
    )  # fmt: skip


def parity(rank: int, world_size: int, schedule: str, sizes: dict[str, int], experts: int) -> list[str]:
    """One step on real processes against the serial order of all ranks in this process: what differs here.

    The list also has the faults of the steps that copy sizes.
    """
    import torch.distributed as dist

    program = compile_schedule(schedule, **sizes)
    mesh = Mesh(program.ranks, experts)
    place = mesh.coordinate(rank)
    groups = [dist.new_group(processes) for processes in mesh.pipelines()]
    near = peer_groups(mesh, place, 30.0)
    transport = TorchTransport(groups[place.replica], 30.0)
    mine = Ranks(small_moe(), program, {place: (near, transport)}, listed, host_lane=True)
    with first_joins() as joins:
        mine.step(trace=True)
    (expected,) = spread(_serially, [(mesh, program)])
    faults = round_trip_faults(program, mine.executors[place].intervals or [], joins)
    return unequal(mine.results()[place], expected[place]) + faults


@contextmanager
def first_joins() -> Iterator[list[int]]:
    """When sizes were first waited for, in ns of `perf_counter_ns`."""
    times: list[int] = []
    join = CopiedSizes.join

    def noted(self: CopiedSizes, where: str = "") -> Sizes:
        if self._sizes is None:
            times.append(perf_counter_ns())
        return join(self, where)

    with patch.object(CopiedSizes, "join", noted):
        yield times


def round_trip_faults(program: Program, spans: Sequence[Interval], joins: Sequence[int]) -> list[str]:
    """Joins outside of the waits that cells have for them, and pairs that compute nothing of the backward meanwhile."""
    waits = [i for i, span in enumerate(spans) if span.part.startswith("wait forward") and "sizes.host" in span.part]
    inside = [sum(spans[i].start <= time <= spans[i].end for time in joins) for i in waits]
    faults = [f"{len(joins)} joins, {inside} in waits"] if not joins or inside != [1] * len(joins) else []
    for i in waits:
        row = spans[i].row
        own = [span.part for span in spans if span.row == row]
        start = next(k for k in reversed(range(i)) if spans[k].part == spans[i].part.replace("wait", "start"))
        meanwhile = [span.part for span in spans[start:i] if span.part.startswith(("run backward", "run weight"))]
        if any(part.startswith("run backward") and "experts" in part for part in own) and not meanwhile:
            faults.append(f"{spans[i].part} of {program.kind[row]}")
    return faults


def _serially(case: tuple[Mesh, Program]) -> dict[Coordinate, dict[str, Tensor]]:
    """The results of all ranks in this process, with cells in serial order."""
    mesh, program = case
    ranks = together(mesh, small_moe(), program, serial)
    ranks.step()
    return ranks.results()
