"""Takes the copies of sizes to the host out of a cell, so that the search begins from the order without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedc.cell.graph import Lane, StageShape
from schedc.cell.list_scheduler import Placed
from schedc.cell.program import Half, graph_of
from schedc.cell.tasks import Tasks, tasks_of

Members = tuple[tuple[int, ...], ...]
"""[nodes of a graph without the host] the nodes of the whole graph that became each, in their order."""


@dataclass(frozen=True)
class WithoutHost:
    """A cell in which the planning of rows, the copy of sizes and the sending are one segment.

    duration: [tasks] times without the copies, in time units. members: [tasks] the tasks of the whole cell that
        became each, in their order.
    """

    tasks: Tasks
    duration: tuple[float, ...]
    members: tuple[tuple[int, ...], ...]

    def order(self, placed: Placed) -> list[int]:
        """The tasks of the whole cell in the order of a schedule without the host: each copy is waited for at once."""
        return [member for index, _, _ in placed for member in self.members[index]]


def without_host(tasks: Tasks, duration: tuple[float, ...]) -> WithoutHost | None:
    """The cell without its copies of sizes; None where it has none, or one that is no round trip of a plan.

    duration: [tasks] times of the whole cell, in time units.
    """
    if not any(task.lane is Lane.HOST for task in tasks.all):
        return None
    opening, closing = _merged(tasks.forward), _merged(tasks.backward)
    if opening is None or closing is None:
        return None
    (forward, first), (backward, second) = opening, closing
    number = tasks.number
    again = {
        node
        for node, members in enumerate(graph_of(tasks.kind, Half.RECOMPUTE, first, second))
        if any((Half.RECOMPUTE, member) in number for member in members)
    }
    bare = tasks_of(tasks.kind, forward, backward, again)
    members = tuple(
        tuple(
            number[task.half, member]
            for member in graph_of(tasks.kind, task.half, first, second)[task.node]
            if (task.half, member) in number
        )
        for task in bare.all
    )
    times = (sum(duration[index] for index in own if tasks.all[index].lane is not Lane.HOST) for own in members)
    return WithoutHost(bare, tuple(times), members)


def _merged(shape: StageShape | None) -> tuple[StageShape | None, Members] | None:
    """The graph without its copies to the host. Each is merged with the segment before it and the one behind it.

    Returns None where a copy has another form than segment, copy, segment, or a gradient goes through it.
    """
    if shape is None:
        return None, ()
    into: dict[int, int] = {}
    for copy, node in enumerate(shape.nodes):
        if node.lane is not Lane.HOST:
            continue
        trip = _round_trip(shape, copy)
        if trip is None or not into.keys().isdisjoint(trip):
            return None
        into |= dict.fromkeys((trip[0], copy), trip[1])
    kept = [index for index in range(len(shape)) if index not in into]
    place = {index: kept.index(into.get(index, index)) for index in range(len(shape))}
    ahead = {index: [node for node, behind in into.items() if behind == index] for index in kept}
    members = tuple(tuple(sorted((*ahead[index], index))) for index in kept)
    nodes = [
        replace(
            shape.nodes[own[-1]],
            after=tuple(sorted({place[needed] for index in own for needed in shape.nodes[index].after} - {number})),
            inputs=any(shape.nodes[index].inputs for index in own),
            behind=place.get(shape.nodes[own[-1]].behind, -1),
        )
        for number, own in enumerate(members)
    ]
    return StageShape(tuple(nodes), tuple(place[index] for index in shape.outputs)), members


def _round_trip(shape: StageShape, copy: int) -> tuple[int, int] | None:
    """The segments before and behind a copy to the host, if both can be one segment with it."""
    before, behind = shape.nodes[copy].after, shape.consumers[copy]
    if len(before) != 1 or len(behind) != 1:
        return None
    (plan,), (send,) = before, behind
    segments = not shape.nodes[plan].exchange and not shape.nodes[send].exchange
    first = all(user == copy or user >= send for user in shape.consumers[plan])
    gradients = {plan, copy} & {*shape.backward, *shape.outputs}
    return (plan, send) if segments and first and not gradients else None
