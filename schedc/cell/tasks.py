"""The work of a cell before it has an order: every segment and exchange of its halves, and what each needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, Lane, StageShape
from schedc.cell.program import KINDS, Half
from schedc.diagnostics import CompilerBug


@dataclass(frozen=True)
class Task:
    """One half of one node. ``after``: indexes of the tasks that must be complete before it."""

    half: Half
    node: int
    lane: Lane
    name: str
    after: tuple[int, ...]

    @property
    def exchange(self) -> bool:
        return self.lane is not Lane.COMPUTE


@dataclass(frozen=True)
class Tasks:
    """All tasks of a cell, each after the ones that it needs.

    forward, backward: the shapes of the two halves. leaving: [2] tasks that complete the outputs of the forward, and
    the gradients of the inputs; None where the cell has none.
    """

    kind: str
    forward: StageShape | None
    backward: StageShape | None
    all: tuple[Task, ...]
    leaving: tuple[tuple[int, ...] | None, tuple[int, ...] | None]

    def __len__(self) -> int:
        return len(self.all)

    def durations(self, forward_costs: CellCosts, backward_costs: CellCosts) -> tuple[float, ...]:
        """[tasks] times under the costs of the two stages."""
        return tuple(
            (forward_costs if task.half is Half.FORWARD else backward_costs).duration(
                self.shape(task.half), task.half, task.node
            )
            for task in self.all
        )

    def shape(self, half: Half) -> StageShape:
        """The graph that nodes of this half belong to."""
        shape = self.forward if half is Half.FORWARD else self.backward
        if shape is None:
            raise CompilerBug("cells", f"a cell {self.kind} without a graph for its {half} half")
        return shape

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """[tasks] the tasks that wait for each, ascending."""
        found: list[list[int]] = [[] for _ in self.all]
        for at, task in enumerate(self.all):
            for before in task.after:
                found[before].append(at)
        return tuple(map(tuple, found))

    @cached_property
    def queues(self) -> tuple[int, ...]:
        """[tasks] the place of each task's queue in `schedc.cell.graph.QUEUES`."""
        return tuple(QUEUES.index(self.shape(task.half).queues[task.node]) for task in self.all)

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """[tasks] how many tasks each waits for."""
        return tuple(len(task.after) for task in self.all)

    @cached_property
    def chained(self) -> frozenset[int]:
        """Exchanges that need another one directly."""
        return frozenset(
            at
            for at, task in enumerate(self.all)
            if task.exchange and any(self.all[before].exchange for before in task.after)
        )


def tasks_of(
    kind: str, forward: StageShape | None, backward: StageShape | None, recomputed: Collection[int] = ()
) -> Tasks:
    """The tasks of a cell of one of `KINDS`.

    recomputed: nodes of the backward to recompute, in addition to those that the graph marks.
    """
    if kind not in KINDS:
        raise CompilerBug("cells", f"no cell of kind {kind}")
    halves = _HALVES[kind]
    maker = _Maker(kind)
    leaving: list[tuple[int, ...] | None] = [None, None]
    if Half.FORWARD in halves:
        shape = _needed(kind, forward)
        number = maker.forward(shape, Half.FORWARD, range(len(shape)))
        leaving[0] = tuple(number[at] for at in shape.outputs)
    if halves == (Half.RECOMPUTE,):
        shape = _needed(kind, backward)
        maker.forward(shape, Half.RECOMPUTE, sorted({*recomputed, *shape.recomputed}))
    elif Half.BACKWARD in halves:
        shape = _needed(kind, backward)
        remade = maker.forward(shape, Half.RECOMPUTE, sorted({*recomputed, *shape.recomputed}))
        number = maker.backward(shape, remade)
        leaving[1] = tuple(sorted(number[at] for at in shape.backward if shape.nodes[at].inputs))
        maker.weights(shape, number if Half.WEIGHT in halves else {})
    elif Half.WEIGHT in halves:
        shape = _needed(kind, backward)
        maker.weights(shape, dict.fromkeys(shape.weights, -1))
    return Tasks(kind, forward, backward, tuple(maker.made), (leaving[0], leaving[1]))


_HALVES = {
    "F": (Half.FORWARD,),
    "I": (Half.BACKWARD,),
    "B": (Half.BACKWARD, Half.WEIGHT),
    "W": (Half.WEIGHT,),
    "R": (Half.RECOMPUTE,),
    "FB": (Half.FORWARD, Half.BACKWARD, Half.WEIGHT),
    "FI": (Half.FORWARD, Half.BACKWARD),
}

_SUFFIX = {Half.FORWARD: "", Half.BACKWARD: ".I", Half.WEIGHT: ".W", Half.RECOMPUTE: ".again"}


def _needed(kind: str, shape: StageShape | None) -> StageShape:
    if shape is None:
        raise CompilerBug("cells", f"a cell {kind} without the graph of its stage")
    return shape


class _Maker:
    """Tasks in the order in which they are made; each pass gives the task of every node that it has."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: list[Task] = []

    def add(self, shape: StageShape, half: Half, at: int, after: Collection[int]) -> int:
        node = shape.nodes[at]
        letter = "F" if half is Half.FORWARD else "B"
        self.made.append(Task(half, at, node.lane, f"{letter}.{node.name}{_SUFFIX[half]}", tuple(sorted(set(after)))))
        return len(self.made) - 1

    def forward(self, shape: StageShape, half: Half, nodes: Collection[int]) -> dict[int, int]:
        number: dict[int, int] = {}
        for at in nodes:
            after = [number[before] for before in shape.nodes[at].after if before in number]
            number[at] = self.add(shape, half, at, after)
        return number

    def backward(self, shape: StageShape, remade: dict[int, int]) -> dict[int, int]:
        """Each after those that give its gradients; and after its own forward, where that is computed once more."""
        number: dict[int, int] = {}
        for at in reversed(shape.backward):
            after = [number[consumer] for consumer in shape.consumers[at] if consumer in number]
            number[at] = self.add(shape, Half.BACKWARD, at, after + ([remade[at]] if at in remade else []))
        return number

    def weights(self, shape: StageShape, number: dict[int, int]) -> None:
        for at in reversed(shape.weights):
            if at in number:
                self.add(shape, Half.WEIGHT, at, [number[at]] if number[at] >= 0 else [])
