"""The serial order inside a cell: one half after the other, every exchange waited for at once.

Every other cell program of the same cell must give the same bits as this one.
"""

from __future__ import annotations

from functools import cache

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, Half, Step


@cache
def serial(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """The serial program of a cell of ``kind`` (`KINDS`), given the graphs of its halves' stages."""
    steps: list[Step] = []
    activation_at = gradient_at = -1
    if forward is not None and "F" in kind:
        for index, node in enumerate(forward.nodes):
            steps += _steps(Half.FORWARD, index, node.exchange)
        activation_at = len(steps)
    if backward is not None and kind != "W":
        for index in backward.recomputed:
            steps += _steps(Half.RECOMPUTE, index, backward.nodes[index].exchange)
    if backward is not None and kind not in ("W", "R"):
        for index in reversed(backward.backward):
            steps += _steps(Half.BACKWARD, index, backward.nodes[index].exchange)
        gradient_at = len(steps)
    if backward is not None and kind[-1] in "BW":
        steps += [Step(Action.RUN, Half.WEIGHT, index) for index in reversed(backward.weights)]
    return CellProgram(steps=tuple(steps), activation_at=activation_at, gradient_at=gradient_at, kind=kind)


def _steps(half: Half, node: int, exchange: bool) -> list[Step]:
    if not exchange:
        return [Step(Action.RUN, half, node)]
    return [Step(Action.START, half, node), Step(Action.WAIT, half, node)]
