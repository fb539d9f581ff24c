"""The work of a cell before it has an order: every segment and exchange of its halves, and its dependencies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, Lane, StageShape
from schedc.cell.program import HALVES, KINDS, CellProgram, Half, graph_of
from schedc.diagnostics import CompilerBug


@dataclass(frozen=True)
class Task:
    """One half of one node. after: indexes of the tasks that must be complete before it."""

    half: Half
    node: int
    lane: Lane
    name: str
    after: tuple[int, ...]

    @property
    def exchange(self) -> bool:
        return self.lane is not Lane.COMPUTE


class CellKey(NamedTuple):
    """What makes the tasks of a cell; see `tasks_of`. recomputed: all nodes that are, ascending."""

    kind: str
    forward: StageShape | None
    backward: StageShape | None
    recomputed: tuple[int, ...]


@dataclass(frozen=True)
class Tasks:
    """All tasks of a cell, in an order in which each comes after its dependencies.

    forward, backward: the two graphs (`schedc.cell.program.HALVES`); of an I & W those of the I and of the W.
    leaving: [2] tasks that complete the outputs of the forward, and the gradients of the backward's inputs; None
        where the cell has none.
    """

    kind: str
    forward: StageShape | None
    backward: StageShape | None
    all: tuple[Task, ...]
    leaving: tuple[tuple[int, ...] | None, tuple[int, ...] | None]

    def __len__(self) -> int:
        return len(self.all)

    @cached_property
    def key(self) -> CellKey:
        """The arguments of `tasks_of` that give an equal value."""
        again = (task.node for task in self.all if task.half is Half.RECOMPUTE)
        return CellKey(self.kind, self.forward, self.backward, tuple(again))

    def durations(self, forward_costs: CellCosts, backward_costs: CellCosts) -> tuple[float, ...]:
        """[tasks] times under the costs of the two stages, in their unit."""
        return tuple(
            graph_of(self.kind, task.half, forward_costs, backward_costs).duration(
                self.shape(task.half), task.half, task.node
            )
            for task in self.all
        )

    def shape(self, half: Half) -> StageShape:
        """The graph of this half."""
        shape = graph_of(self.kind, half, self.forward, self.backward)
        if shape is None:
            raise CompilerBug("cells", f"a cell {self.kind} without a graph for its {half} half")
        return shape

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """[tasks] the tasks that depend on each, ascending."""
        followers: list[list[int]] = [[] for _ in self.all]
        for index, task in enumerate(self.all):
            for before in task.after:
                followers[before].append(index)
        return tuple(map(tuple, followers))

    def longest_paths(self, duration: Sequence[float]) -> list[float]:
        """[tasks] time of the longest chain from the start of each task to the end of the cell. duration: [tasks]."""
        path = [0.0] * len(self)
        for index in reversed(range(len(self))):
            path[index] = duration[index] + max((path[follower] for follower in self.followers[index]), default=0.0)
        return path

    @cached_property
    def number(self) -> dict[tuple[Half, int], int]:
        """The index of the task of each half and node."""
        return {(task.half, task.node): index for index, task in enumerate(self.all)}

    @cached_property
    def queues(self) -> tuple[int, ...]:
        """[tasks] index of each task's queue in `schedc.cell.graph.QUEUES`."""
        return tuple(QUEUES.index(self.shape(task.half).queues[task.node]) for task in self.all)

    @cached_property
    def alike(self) -> dict[frozenset[str], Any]:
        """What `schedc.cell.cost_batch` has found of these tasks, by the names of costs."""
        return {}

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """[tasks] on how many tasks each depends."""
        return tuple(len(task.after) for task in self.all)

    @cached_property
    def chained(self) -> frozenset[int]:
        """Exchanges that depend directly on another exchange."""
        return frozenset(
            index
            for index, task in enumerate(self.all)
            if task.exchange and any(self.all[before].exchange for before in task.after)
        )


def tasks_of(
    kind: str, forward: StageShape | None, backward: StageShape | None, recomputed: Collection[int] = ()
) -> Tasks:
    """The tasks of a cell of one of `KINDS`.

    recomputed: nodes to recompute, of the graph whose backward runs, in addition to marked nodes. The weight
    gradients come after the input gradients of the same op, and of another op at any time.
    """
    return _tasks(CellKey(kind, forward, backward, tuple(sorted(recomputed))))


def tasks_of_program(program: CellProgram, forward: StageShape | None, backward: StageShape | None) -> Tasks:
    """The tasks of the cell that a program runs, with the nodes that it recomputes."""
    recomputed = {step.node for step in program.steps if step.half is Half.RECOMPUTE}
    return tasks_of(program.kind, forward, backward, recomputed)


@lru_cache(4096)
def _tasks(cell: CellKey) -> Tasks:
    """`tasks_of`, once for each cell."""
    kind, forward, backward, recomputed = cell
    if kind not in KINDS:
        raise CompilerBug("cells", f"no cell of kind {kind}")
    builder = _TaskBuilder(kind)
    last: list[tuple[int, ...] | None] = [None, None]
    for graph, halves in zip((forward, backward), HALVES[kind], strict=True):
        if not halves:
            continue
        shape = _needed(kind, graph)
        tasks, recomputing = dict.fromkeys(shape.weights, -1), dict[int, int]()
        if Half.FORWARD in halves:
            tasks = builder.forward(shape, Half.FORWARD, range(len(shape)))
            last[0] = tuple(tasks[node] for node in shape.outputs)
        if Half.RECOMPUTE in halves:
            recomputing = builder.forward(shape, Half.RECOMPUTE, sorted({*recomputed, *shape.recomputed}))
        if Half.BACKWARD in halves:
            tasks = builder.backward(shape, recomputing)
            last[1] = tuple(sorted(tasks[node] for node in shape.backward if shape.nodes[node].inputs))
        if Half.WEIGHT in halves:
            builder.weights(shape, tasks)
    return Tasks(kind, forward, backward, tuple(builder.tasks), (last[0], last[1]))


_SUFFIX = {Half.FORWARD: "", Half.BACKWARD: ".I", Half.WEIGHT: ".W", Half.RECOMPUTE: ".again"}


def _needed(kind: str, shape: StageShape | None) -> StageShape:
    if shape is None:
        raise CompilerBug("cells", f"a cell {kind} without the graph of its stage")
    return shape


class _TaskBuilder:
    """Collects tasks. Each pass returns the number of the task of every node that it covers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tasks: list[Task] = []

    def add(self, shape: StageShape, half: Half, index: int, after: Collection[int]) -> int:
        node = shape.nodes[index]
        letter = "F" if half is Half.FORWARD else "B"
        self.tasks.append(
            Task(half, index, node.lane, f"{letter}.{node.name}{_SUFFIX[half]}", tuple(sorted(set(after))))
        )
        return len(self.tasks) - 1

    def forward(self, shape: StageShape, half: Half, nodes: Collection[int]) -> dict[int, int]:
        task_of: dict[int, int] = {}
        for index in nodes:
            after = [task_of[before] for before in shape.nodes[index].after if before in task_of]
            task_of[index] = self.add(shape, half, index, after)
        return task_of

    def backward(self, shape: StageShape, recomputing: dict[int, int]) -> dict[int, int]:
        """Tasks behind the sources of their gradients and, where a node is recomputed, behind its recomputation."""
        task_of: dict[int, int] = {}
        for index in shape.backward_order:
            after = [task_of[consumer] for consumer in shape.consumers[index] if consumer in task_of]
            after += [recomputing[index]] if index in recomputing else []
            task_of[index] = self.add(shape, Half.BACKWARD, index, after + _before(shape, index, task_of))
        return task_of

    def weights(self, shape: StageShape, task_of: dict[int, int]) -> None:
        added: dict[int, int] = {}
        for index in shape.weight_order:
            if shape.nodes[index].exchange:
                sources = [added.get(taker, task_of.get(taker, -1)) for taker in shape.consumers[index]]
            else:
                sources = [task_of[index]]
            after = [source for source in sources if source >= 0]
            added[index] = self.add(shape, Half.WEIGHT, index, after + _before(shape, index, added))


def _before(shape: StageShape, index: int, task_of: dict[int, int]) -> list[int]:
    """The task of a segment for the slice before: parameters get the gradients of slices in ascending order."""
    node = shape.nodes[index]
    return [] if node.exchange or node.behind not in task_of else [task_of[node.behind]]
