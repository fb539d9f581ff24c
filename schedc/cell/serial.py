"""The serial order inside a cell: one half after the other, every exchange waited for at once.

Every other cell program of the same cell must give the same bits as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from schedc.cell.graph import StageShape
from schedc.cell.program import HALVES, Action, CellProgram, CellStep, Half


@cache
def serial(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """The serial program of a cell of ``kind`` (`KINDS`), given the graphs of its halves' stages."""
    steps: list[CellStep] = []
    activation_at = gradient_at = -1
    for graph, halves in zip((forward, backward), HALVES[kind], strict=True):
        if graph is None:
            continue
        for half in halves:
            nodes = _NODES[half](graph)
            steps += [step for node in nodes for step in _steps(half, node, graph.nodes[node].exchange)]
            if half is Half.FORWARD:
                activation_at = len(steps)
            elif half is Half.BACKWARD:
                gradient_at = len(steps)
    return CellProgram(steps=tuple(steps), activation_at=activation_at, gradient_at=gradient_at, kind=kind)


_NODES: dict[Half, Callable[[StageShape], Iterable[int]]] = {
    Half.FORWARD: lambda graph: range(len(graph)),
    Half.RECOMPUTE: lambda graph: graph.recomputed,
    Half.BACKWARD: lambda graph: graph.backward_order,
    Half.WEIGHT: lambda graph: graph.weight_order,
}
"""The nodes that each half runs, in order."""


def _steps(half: Half, node: int, exchange: bool) -> list[CellStep]:
    if not exchange:
        return [CellStep(Action.RUN, half, node)]
    return [CellStep(Action.START, half, node), CellStep(Action.WAIT, half, node)]
