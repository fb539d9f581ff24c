"""Gives the stages here the lanes on which the program's offloads and fetches run, and says which microbatches move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from schedc.ir.plan import Plan
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.scopes import is_chosen, line_per_stage
from schedc.ir.works import WorkKind
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_works import placed_in
from schedc_runtime.pipeline.build.stages import StagesByIndex

if TYPE_CHECKING:
    from schedc_runtime.offload.lanes import Lanes


def offload_stages(
    program: Program, rank: int, held: StagesByIndex, device: torch.device, plan: Plan, name: str
) -> Lanes | None:
    """Let the stages of a rank move what the program's works move; the rank's lanes, None where nothing moves.

    held: the stages of the rank, by index. plan: the program's. The bytes of its host limit the rank's buffers; host
    memory without a unit limits nothing here. name: what errors call the rank.
    """
    moving, host = moving_microbatches(program, rank), plan.host
    if not moving:
        return None
    from schedc_runtime.offload.lanes import lanes_for
    from schedc_runtime.offload.rules import OffloadSettings

    lanes = lanes_for(device)
    lanes.buffers.name = name
    if host is not None and host.in_bytes:
        lanes.buffers.limit, lanes.buffers.slack = host.size, max(1.0, host.size / _most_on_host(program, rank))
    rules = {} if is_chosen(plan) else line_per_stage(plan.offload, program.stages, program.placement)
    for stage, microbatches in moving.items():
        named = frozenset(rules[stage].roles) if stage in rules else frozenset()
        there = held[stage].roles
        roles = named & there if there else named - {"dense"}  # a dense stage that runs as a whole moves as a whole
        held[stage].set_offload(OffloadSettings(lanes, roles=roles, microbatches=frozenset(microbatches)))
    return lanes


def _most_on_host(program: Program, rank: int) -> float:
    """The most bytes that lie on the host of a rank, by the works of the program; at least 1."""
    dependencies = Dependencies.of(computation(program)[0])
    low, high = dependencies.rank_start[rank : rank + 2] + np.array([rank, rank + 1])
    return max(1.0, float(placed_in(program).on_host(dependencies)[low:high].max()))


def told_buffers(lanes: Iterable[Lanes]) -> list[str]:
    """A line for each rank here that has had host buffers: the most bytes, and of what memory."""
    return [
        f"{buffers.name}: host buffers took {buffers.most:,} bytes at most, {buffers.memory}"
        for of_rank in lanes
        if (buffers := of_rank.buffers).most
    ]


def moving_microbatches(program: Program, rank: int) -> dict[int, set[int]]:
    """By stage: the microbatches that leave the device on that rank."""
    rows = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    works, moving = program.works, dict[int, set[int]]()
    for work in program.work[rows][np.asarray(program.kind[rows]) == InstructionKind.START].tolist():
        if works.kind[work] == WorkKind.OFFLOAD:
            moving.setdefault(int(works.stage[work]), set()).add(int(works.microbatch[work]))
    return moving
