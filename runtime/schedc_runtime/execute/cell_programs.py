"""Cell programs at run time: the order inside each instruction of a rank, chosen, listed and checked.

An instruction on segmented stages is a cell: its order is a `CellProgram` over the graphs of its stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from schedc.cell import CellCosts, CellProgram, PlanOrder, SegmentTimes, StageShape, cell_program
from schedc.cell.collectives import verify_collectives
from schedc.cell.issue_order import CellOnRank, ExpertRanks
from schedc.cell.serial import serial
from schedc.cell.verify import verify_cell
from schedc.diagnostics import DiagnosticError
from schedc.ir.ops import FACTS
from schedc.ir.plan import Plan
from schedc.ir.program import Instruction, Program
from schedc.ir.recomputed import recomputed_slots
from schedc.plan.counts.copy_times import copy_by_itself
from schedc_runtime.device.choice import device_for
from schedc_runtime.execute.micro_steps import CellSource, Slots, shapes_of
from schedc_runtime.execute.operands import ComputeStage
from schedc_runtime.ranks.expert_group import ExpertGroup

TYPICAL_COSTS = CellCosts.of(
    {
        "attention": SegmentTimes(20, 20, 18),
        "experts": SegmentTimes(20, 20, 26),
        "shared": SegmentTimes(6, 6, 6),
        "post": SegmentTimes(2, 2),
        "dense": SegmentTimes(30, 30, 30),
    },
    {f"{label}.{lane}": 12.0 for label in ("dispatch", "combine", "hot") for lane in ("rail", "node")}
    | {"sizes.host": 1.0},
)
"""Times by which cells are ordered where no costs are given: only their proportions count.

Measured of DeepSeek-V3-like blocks: attention and experts alike, an All-to-All a bit more than half as long."""


def cell_source(plan: Plan, costs: CellCosts | None) -> CellSource:
    """The order inside cells: by the plan's own lines, else by ``costs``; serial where the plan overlaps nothing.

    Copies of experts by microbatch are ordered as one copy, where the costs have no time of them.
    """
    if not plan.ordered:
        return serial
    orders = {cell.kind: PlanOrder(cell.compute, cell.communication) for cell in plan.cells}
    times = costs or TYPICAL_COSTS
    if (copy := copy_by_itself(plan, times)) is not None:
        times = times.with_exchange(*copy)

    def source(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
        return cell_program(kind, forward, backward, times, orders.get(kind))

    return source


def asks_on_lane(plan: Plan, cells: CellCosts | CellSource | None, device: torch.device) -> bool:
    """Whether the copy of sizes to the host is a step of cells: where costs give it a time; without costs, on a GPU."""
    if isinstance(cells, CellCosts):
        return cells.asks_host
    return cells is None and plan.ordered and not device_for(device).supports("streams")


def cells_on_rank(
    program: Program, rank: int, stages: Mapping[int, ComputeStage], source: CellSource
) -> dict[str, CellOnRank]:
    """The cell of every kind of instruction that ``rank`` runs on segmented stages, by its name: ``FB of 3 and 4``.

    A backward whose microbatch has an R is a cell of its own: ``B of 3 after R``. The cell of a forward alone,
    ``F of 3``, is always listed: the program of an evaluation consists of such cells.
    """
    shapes = {index: stage.shape for index, stage in stages.items() if stage.shape is not None}
    cells = {f"F of {i}": CellOnRank(shape, None, source("F", shape, None)) for i, shape in shapes.items()}
    recomputed = recomputed_slots(program)
    for instruction in program.instructions(rank):
        if (halves := shapes_of(instruction, stages, recomputed)) is not None:
            name = _name(instruction, recomputed)
            if name not in cells:
                cells[name] = CellOnRank(*halves, source(instruction.kind_name, *halves))
    return cells


def check_cells(program: Program, rank: int, cells: Mapping[str, CellOnRank], group: ExpertGroup) -> None:
    """Refuse cells with a step ahead of its inputs, or with collectives that would deadlock.

    Raises `DiagnosticError` (S320 to S322).
    """
    findings = [
        finding for cell in cells.values() for finding in verify_cell(cell.program, cell.forward, cell.backward)
    ]
    idle = CellOnRank(None, None, CellProgram((), -1, -1, "F"))
    recomputed = recomputed_slots(program)

    def cell_of(on_rank: int, expert: int, instruction: Instruction) -> CellOnRank:
        return cells.get(_name(instruction, recomputed), idle) if on_rank == rank else idle

    if not findings and cells:
        findings = verify_collectives(program, ExpertRanks(group.nodes, group.per_node), cell_of)
    if findings:
        raise DiagnosticError(findings)


def _name(instruction: Instruction, recomputed: Slots) -> str:
    stages = " and ".join(str(stage) for stage in instruction.stages)
    return f"{instruction.kind_name} of {stages}{' after R' if _after_r(instruction, recomputed) else ''}"


def _after_r(instruction: Instruction, recomputed: Slots) -> bool:
    """Whether the backward of an instruction comes behind an R."""
    return any(FACTS[kind].backward and (stage, number) in recomputed for kind, stage, number in instruction.ops)
