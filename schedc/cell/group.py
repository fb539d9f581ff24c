"""A cell on all ranks of an expert group in step: each has its own rows, and an exchange waits for the last.

An exchange begins on a queue when the last rank of the communicator has started it. It takes as long as on the rank
with the most rows. A rank that blocks for it stands *waiting* until it begins, and *exposed* while it is carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schedc.cell.costs import OF_ROWS, CellCosts
from schedc.cell.graph import Lane, StageShape
from schedc.cell.issue_order import ExpertRanks, scope
from schedc.cell.program import CellProgram, graph_of
from schedc.cell.tasks import Tasks, tasks_of_program
from schedc.ir.arrays import Floats


@dataclass(frozen=True, eq=False)
class GroupTasks:
    """A cell program, and the times of its tasks on every rank of a group.

    members: [tasks] groups of ranks that exchange with each other; None for a segment, and where all ranks do. Empty
        for what asks the own host: every rank is alone.
    base: [tasks] times at the mean rows. layers: [tasks] number of the layer in the stage, -1 where rows do not matter.
    copied: [tasks] number of the layer whose copies of experts travel, -1 for others.
    """

    program: CellProgram
    tasks: Tasks
    members: tuple[tuple[tuple[int, ...], ...] | None, ...]
    base: tuple[float, ...]
    layers: tuple[int, ...]
    copied: tuple[int, ...]

    @classmethod
    def of(
        cls,
        program: CellProgram,
        forward: StageShape | None,
        backward: StageShape | None,
        costs: CellCosts,
        ranks: ExpertRanks | None = None,
    ) -> GroupTasks:
        """ranks: who exchanges with whom; None: all with all."""
        tasks = tasks_of_program(program, forward, backward)
        nodes = [tasks.shape(task.half).nodes[task.node] for task in tasks.all]
        members = tuple(
            _members(tasks.shape(task.half), task.node, ranks) if task.exchange else None for task in tasks.all
        )
        layers = tuple(node.layer if node.role in OF_ROWS else -1 for node in nodes)
        copied = tuple(node.layer if node.role == "hot" else -1 for node in nodes)
        return cls(program, tasks, members, tasks.durations(costs, costs), layers, copied)


def _members(shape: StageShape, node: int, ranks: ExpertRanks | None) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of each communicator that runs an exchange; None where one has all ranks of the group."""
    lane = shape.nodes[node].lane
    if lane is Lane.HOST:
        return ()
    if ranks is None:
        return None
    reach = scope(shape, node)
    names = dict.fromkeys(ranks.communicator(lane, reach, rank) for rank in range(ranks.size))
    return tuple(tuple(ranks.members(name)) for name in names) if len(names) > 1 else None


def task_times(
    cell: GroupTasks,
    forward: Floats,
    backward: Floats,
    copies: tuple[Floats, Floats] | None = None,
    links: Mapping[Lane, tuple[Floats, Floats]] | None = None,
) -> list[Floats]:
    """[tasks][cells or 1, ranks] times of a cell's tasks.

    forward, backward: [layers of the stage or 1, cells or 1, ranks] factors of rows in each half. copies: the same of
    copied experts, over those that the costs are for; None: as many in each cell. links: the same of rows on a lane;
    without them a rank's links carry the rows that it computes.
    """
    times: list[Floats] = []
    for index, task in enumerate(cell.tasks.all):
        layer, factors = cell.layers[index], graph_of(cell.tasks.kind, task.half, forward, backward)
        if copies is not None and cell.copied[index] >= 0:
            layer, factors = cell.copied[index], graph_of(cell.tasks.kind, task.half, *copies)
        elif task.exchange and links and task.lane in links:
            factors = graph_of(cell.tasks.kind, task.half, *links[task.lane])
        time = np.full((1, factors.shape[2]), cell.base[index])
        if layer >= 0:
            own = factors[layer if len(factors) > 1 else 0]
            time = cell.base[index] * (_last(own, cell.members[index]) if task.exchange else own)
        times.append(time)
    return times


def _last(values: Floats, members: tuple[tuple[int, ...], ...] | None) -> Floats:
    """[cells, ranks] the largest value among the ranks of each rank's communicator."""
    if members is None:
        return np.broadcast_to(values.max(axis=-1, keepdims=True), values.shape)
    last = np.array(values)
    for ranks in members:
        last[..., ranks] = values[..., ranks].max(axis=-1, keepdims=True)
    return last
