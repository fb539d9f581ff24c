"""Measures how long ranks are idle for gathers of parameters and for sums of gradients, beside the former way.

    python benchmarks/sharding.py [--json] [--schedule interleaved_1f1b] [-D P=2 -D M=12 -D v=6] [--ratio 1.0]

Instrument: emulated device time (`schedc_runtime.measure.emulated_device`) on real processes over gloo, by default two
pipeline ranks times four replicas, a GPT with a block for each stage. A block takes 10 ms forward, 10 for the gradients
of its inputs and 10 for its weight gradients. The lane `dp` carries three quarters of a work's bytes. The largest stage
takes ``--ratio`` forwards there. Clocks do not depend on the load of the machine.

Each process trains two steps four times: with and without FSDP2, and each with works where the pipeline puts them, and
where sums and gathers ran before they were works. Gathers then ran in front of their use. Sums of shards ran right
where they start. The second half of other sums ran at the end of the stream.

    exposed_gather    seconds that ranks were idle for gathers alone, over those of the former way. The first gather of
                      rank 0 has nothing to hide behind: with v chunks of one size 1 / v is the least
    exposed_sum       the same for both halves of the sums without FSDP2. The last sum of a rank has nothing behind it:
                      2 / (v + 1) is the least
    exposed_reduce    the same for the sums of shards: 1 / v is the least
    step_over_former  the longest step with FSDP2 over that of the former way
    bitwise           whether losses and gradients of all four have the same bits on all ranks
    predicted_*       the same figures by `schedc.step.placed_works`, from the same programs, bytes and times. Its
                      cells send messages at their end
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from figures import give, parser_of
from torch import Tensor

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.ir.program import Program, computation
from schedc.ir.works import KIND_NAMES, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import LaneTimes, PlacedWorks, WorkPlace
from schedc.step.program.insert_works import insert_works, placed_in, without_works
from schedc.step.timeline import durations
from schedc.step.work_runs import run_with_works
from schedc.step.works.place_replica_works import ReplicaBytes, lane_times
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.testing import pool

REPLICAS = 4
FORWARD = 10e-3
"""Seconds of a block's forward, of its input gradients, and of its weight gradients."""
UNIT = 1e-3
COSTS = CellCosts.of({"dense": SegmentTimes(10, 10, 10)}, {})
SUMS = (WorkKind.SCATTER, WorkKind.SPREAD)


def former(program: Program, sharded: bool) -> Program:
    """The program with works where gathers and sums ran before they were works."""
    dependencies = Dependencies.of(computation(program)[0])
    placed = placed_in(program)
    works, rank = placed.works, placed.rank_of(placed.start, dependencies)
    end = dependencies.rank_start[rank + 1] + rank
    gather, scatter, spread = (works.kind == kind for kind in (WorkKind.GATHER, *SUMS))
    start, join = np.where(gather, placed.join, placed.start), placed.join.copy()
    start_place, join_place = placed.start_place.copy(), placed.join_place.copy()
    if sharded:
        join[scatter] = start[scatter]
        join_place[scatter] = WorkPlace.LEFT
    else:
        join[scatter], join_place[scatter] = end[scatter], WorkPlace.SUMMED
        start[spread], start_place[spread] = end[spread], WorkPlace.SPREAD
    moved = PlacedWorks(works, start, join, start_place, join_place).in_order()
    return insert_works(without_works(program), dependencies, moved)


def trained(rank: int, world_size: int, schedule: str, sizes: dict[str, int], ratio: float) -> dict[str, Any]:
    """Steps of all four on this process: times by kind of work, and digests of losses and gradients."""
    program = schedc.compile(schedule, **sizes)
    mesh = Mesh(program.ranks, data=REPLICAS)
    return {
        f"{'sharded' if shard else 'whole'} {way}": steps(rank, program, replace(mesh, shard_dense=shard), way, ratio)
        for shard in (False, True)
        for way in ("works", "former")
    }


def steps(rank: int, program: Program, mesh: Mesh, way: str, ratio: float) -> dict[str, Any]:
    """Two steps on this process, the second in emulated time."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, heads=2, blocks=program.stages, vocab=8, context=6)).double()
    generator = torch.Generator().manual_seed(rank % mesh.replicas)
    batch, targets = (torch.randint(0, 8, (program.microbatches, 6), generator=generator) for _ in range(2))
    pipe = Pipeline(
        model, program, loss_fn=next_token_loss, mesh=mesh, cut=Cut(segmented=True), timeout=120, example=batch
    )
    if way == "former":
        pipe.program = former(pipe.program, mesh.shard_dense)
    losses = [pipe.step(batch, targets)]
    stages = pipe._assembly.stage_bytes
    most = max(sum(size) for size in stages.values())
    device = Device(
        COSTS, UNIT, SharedStarts.of_processes(mesh, rank),
        speeds={"dp": most * (mesh.replicas - 1) / mesh.replicas / (ratio * FORWARD)},
    )  # fmt: skip
    for bound in pipe._bound_code._bound.values():
        for executor in bound.executors.values():
            executor.code = device.code(executor.code)
    losses.append(pipe.step(batch, targets))
    digests = {"loss": digest(torch.stack(losses))}
    digests |= {name: digest(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
    lanes = predicted(pipe.program, list(stages.items()), ratio)
    pipe.close()
    return {
        "exposed": {kind: times.exposed for kind, times in device.kinds.items()},
        "clock": device.clock, "digests": digests, "predicted": lanes,
    }  # fmt: skip


def digest(value: Any) -> str:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()


def predicted(program: Program, stages: list[tuple[int, Any]], ratio: float) -> dict[str, Any]:
    """Exposed seconds by kind over all ranks, and the longest step, as the compiler prices the same program."""
    dependencies = Dependencies.of(computation(program)[0])
    placed = placed_in(program)
    columns = np.array([size for _, size in sorted(stages)], np.float64)
    sizes, per_byte = ReplicaBytes(*columns.T), ratio * FORWARD / float(columns.sum(axis=1).max())
    costs = Costs(F=FORWARD, I=FORWARD, W=FORWARD).resolved(program.stages)
    duration = durations(dependencies, costs)
    time = lane_times(placed, dependencies, sizes, (per_byte, per_byte))
    lanes: LaneTimes = run_with_works(dependencies, duration, 0.0, placed, time)
    exposed = {KIND_NAMES[kind]: float(lanes.exposed[placed.works.kind == kind].sum()) for kind in WorkKind}
    return {"exposed": exposed, "step": float(lanes.closed.max())}


def compared(schedule: str, sizes: dict[str, int], ratio: float) -> dict[str, Any]:
    """The figures over all ranks."""
    world = schedc.compile(schedule, **sizes).ranks * REPLICAS
    ranks = pool(world).run("sharding:trained", schedule=schedule, sizes=sizes, ratio=ratio, timeout=540)
    digests = [[rank[name]["digests"] for name in rank] for rank in ranks]

    def exposed(name: str, *kinds: str) -> float:
        return sum(rank[name]["exposed"].get(kind, 0.0) for rank in ranks for kind in kinds)

    def told(name: str, *kinds: str) -> float:
        return REPLICAS * sum(ranks[0][name]["predicted"]["exposed"][kind] for kind in kinds)

    figures: dict[str, Any] = {
        "schedule": schedule, "sizes": sizes, "replicas": REPLICAS, "ratio": ratio,
        "bitwise": all(each == of_rank[0] for of_rank in digests for each in of_rank),
    }  # fmt: skip
    for key, run, kinds in (
        ("exposed_gather", "sharded", ("gather",)),
        ("exposed_reduce", "sharded", ("scatter",)),
        ("exposed_sum", "whole", ("scatter", "spread")),
    ):
        for prefix, count in (("", exposed), ("predicted_", told)):
            now, before = count(f"{run} works", *kinds), count(f"{run} former", *kinds)
            figures[f"{prefix}{key}"] = now / before
            figures[f"{prefix}{key}_seconds"] = [now, before]
    step = {name: max(rank[name]["clock"] for rank in ranks) for name in ranks[0]}
    priced = {name: ranks[0][name]["predicted"] for name in ranks[0]}
    figures["step_over_former"] = step["sharded works"] / step["sharded former"]
    figures["predicted_step_over_former"] = priced["sharded works"]["step"] / priced["sharded former"]["step"]
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedule", default="interleaved_1f1b", help="schedule of the library")
    parser.add_argument("-D", dest="sizes", action="append", metavar="NAME=VALUE", help="a size of the schedule")
    parser.add_argument("--ratio", type=float, default=1.0, help="forwards of a collective of the largest stage")
    options = parser.parse_args()
    sizes = dict(size.split("=") for size in options.sizes or ("P=2", "M=4", "v=12"))
    figures = compared(options.schedule, {name: int(value) for name, value in sizes.items()}, options.ratio)
    give(figures, options)


if __name__ == "__main__":
    main()
