"""Cells for tests: a layer of known times, standard and drawn graphs, and what a cell of them takes."""

from __future__ import annotations

from hypothesis import strategies as st

from schedc.cell import (
    CellCosts,
    Lane,
    Node,
    PlanOrder,
    SegmentTimes,
    StageShape,
    cell_program,
)
from schedc.cell.predict import Prediction, predict
from schedc.cell.program import HALVES, KINDS, Half

REFERENCE = {
    "attention": SegmentTimes(20, 20, 18),
    "shared": SegmentTimes(6, 6),
    "experts": SegmentTimes(20, 20, 26),
    "post": SegmentTimes(2, 2),
}
"""Milliseconds of a layer whose overlap was measured on real processes and simulated elsewhere."""


def reference_costs(exchange: float, routing: float = 0.0) -> CellCosts:
    return CellCosts.of(
        REFERENCE,
        {"dispatch.rail": exchange, "combine.rail": exchange, "routing.rail": routing},
    )


def reference_shape(layers: int = 4) -> StageShape:
    """Attention with its router, dispatch, experts, combine, post; a shared expert beside them. Counts travel free."""
    nodes: list[Node] = []

    def add(name: str, after: tuple[int, ...], lane: Lane = Lane.COMPUTE, weights: bool = False) -> int:
        nodes.append(Node(name, lane, tuple(sorted(after)), inputs=not nodes, weights=weights))
        return len(nodes) - 1

    last: tuple[int, ...] = ()
    for layer in range(layers):
        attention = add(f"{layer}.attention", last, weights=True)
        shared = add(f"{layer}.shared", (attention,))
        dispatch = add(f"{layer}.dispatch.rail", (attention,), Lane.RAIL)
        experts = add(f"{layer}.experts", (dispatch,), weights=True)
        combine = add(f"{layer}.combine.rail", (experts,), Lane.RAIL)
        last = (add(f"{layer}.post", (attention, shared, combine)),)
    return StageShape(tuple(nodes), last)


def shapes_of(kind: str, forward: StageShape, backward: StageShape) -> tuple[StageShape | None, StageShape | None]:
    on_first, on_second = HALVES[kind]
    return forward if on_first else None, backward if on_second else None


def predicted(kind: str, shape: StageShape, costs: CellCosts, order: PlanOrder | None = None) -> Prediction:
    halves = shapes_of(kind, shape, shape)
    return predict(cell_program(kind, *halves, costs, order), *halves, costs)


@st.composite
def graphs(draw: st.DrawFn) -> StageShape:
    """Any graph of segments and exchanges, exchanges that follow each other directly included."""
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 9))):
        lane = draw(st.sampled_from(list(Lane)))
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        nodes.append(
            Node(
                f"{index}.{draw(st.sampled_from(['attention', 'experts', 'dispatch', 'shared']))}",
                lane,
                tuple(sorted(after)),
                inputs=not after or draw(st.booleans()),
                differentiable=draw(st.booleans()),
                weights=lane is Lane.COMPUTE and draw(st.booleans()),
            )
        )
    outputs = draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1, max_size=2))
    return StageShape(tuple(nodes), tuple(sorted(outputs)))


@st.composite
def cells(draw: st.DrawFn) -> tuple[str, StageShape, StageShape, CellCosts, tuple[int, ...]]:
    forward, backward = draw(graphs()), draw(graphs())
    times = st.integers(0, 12).map(float)
    roles = ("attention", "experts", "shared")
    segments = {role: SegmentTimes(draw(times), draw(times), draw(times)) for role in roles}
    exchanges = {f"{role}.{lane}": draw(times) for role in (*roles, "dispatch") for lane in (Lane.RAIL, Lane.NODE)}
    kind = draw(st.sampled_from(KINDS))
    on_first, on_second = HALVES[kind]
    recomputing = forward if Half.RECOMPUTE in on_first else backward if Half.RECOMPUTE in on_second else None
    again = draw(st.sets(st.sampled_from(range(len(recomputing))), max_size=3)) if recomputing else ()
    return kind, forward, backward, CellCosts.of(segments, exchanges), tuple(sorted(again))
