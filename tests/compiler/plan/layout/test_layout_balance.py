"""`balance` against every layout there is: small models, all placements, arbitrary costs and caps."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.diagnostics import DiagnosticError
from schedc.ir.placement import Placement, linear, loop, v_shape, waves
from schedc.plan.layout import LayerCosts, Layout, Model, ModelPart, PartKind, PerKind, frontier
from schedc.plan.layout.balancing import groups_of
from schedc.plan.layout.compare import load_per_rank
from support.sweeps import swept

pytestmark = pytest.mark.slow

PLACEMENTS = [
    linear(1, 4),
    linear(3, 4),
    loop(2, 4, 2),
    loop(2, 4, 3),
    v_shape(3, 4),
    waves(2, 4, 2),
    Placement(np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.int32), (0, 2, 4), 4),
    Placement(np.array([[0, 0, 1, 1, 0]], np.int32), (0, 4), 2),
]
COST = st.sampled_from([0.0, 0.25, 1.0, 1.3, 2.0, 3.7])
PER_KIND = st.builds(PerKind, COST, COST, COST, COST, COST)


def every_layout(model: Model, stages: int) -> list[Layout]:
    row = [*model.decoder, *model.predictions]
    found = []
    for cuts in combinations_with_replacement(range(len(row) + 1), stages - 1):
        bounds = [0, *cuts, len(row)]
        parts = [row[a:b] for a, b in pairwise(bounds)]
        alone = 0 if not model.mtp else max(1, model.losses - 1)  # stages at the end that hold nothing but a head
        if not any(parts[stages - alone :]):
            parts[0] = [*model.entry, *parts[0]]
            for number in range(model.losses):
                stage = stages - model.losses + number
                parts[stage] = [*parts[stage], ModelPart(PartKind.HEAD, number)]
            found.append(Layout(tuple(map(tuple, parts))))
    return found


def value(layout: Layout, placement: Placement, costs: LayerCosts) -> tuple[float, float]:
    time = costs.per_stage(layout)
    return round(float(load_per_rank(placement, time).max()), 9), round(float(time.max()), 9)


def held(layout: Layout, placement: Placement, costs: LayerCosts, in_flight: list[int]) -> float:
    memory = costs.per_stage(layout, "parameters") + costs.per_stage(layout, "activations") * in_flight
    groups = [list(group) for group in groups_of(placement)]
    return round(max(float(memory[group].sum()) for group in groups), 9)


@pytest.mark.sweep
@given(data=st.data())
@settings(max_examples=swept(100, 40))
def test_no_layout_is_better(data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS))
    layers = data.draw(st.integers(1, 7))
    mtp = data.draw(st.integers(0, min(2, placement.stages - 1)))
    dense, losses = data.draw(st.none() | st.integers(0, layers)), data.draw(st.sampled_from((1, mtp + 1)))
    model = Model(layers, dense, mtp, losses, data.draw(st.booleans()) and mtp > 0)
    costs = LayerCosts(data.draw(PER_KIND), data.draw(PER_KIND), data.draw(PER_KIND))
    in_flight = data.draw(st.lists(st.integers(0, 4), min_size=placement.stages, max_size=placement.stages))
    pad = data.draw(
        st.none() | st.integers(0, 2).map(lambda more: -layers % placement.stages + more * placement.stages)
    )
    width = layers if pad is None else (layers + pad) // placement.stages
    every = [layout for layout in every_layout(model, placement.stages)
             if max(len(layout.layers_of(stage)) for stage in range(placement.stages)) <= width]  # fmt: skip
    memory = data.draw(st.none() | st.sampled_from([1.0, 5.0, 9.5, 20.0, 60.0]))
    within = [one for one in every if memory is None or held(one, placement, costs, in_flight) <= memory]
    try:
        found = list(frontier(model, placement, costs, pad=pad, memory=memory, in_flight=in_flight))
    except DiagnosticError as error:
        assert not within
        (finding,) = error.diagnostics
        assert finding.code == ("S406" if every else "S143")
        if every:
            least = min(held(one, placement, costs, in_flight) for one in every)
            assert f"allow {least:g}," in finding.help
        return
    values = {value(one, placement, costs) for one in within}
    pareto = sorted(v for v in values if not any(o != v and o[0] <= v[0] and o[1] <= v[1] for o in values))
    assert [(round(best.largest_rank, 9), round(best.largest_stage, 9)) for best in found] == pareto
    for best in found:
        assert value(best.layout, placement, costs) == (round(best.largest_rank, 9), round(best.largest_stage, 9))
        assert memory is None or held(best.layout, placement, costs, in_flight) <= memory
        assert best.layout.model.decoder == model.decoder
        assert (best.layout.losses, best.layout.embeds_first) == (model.losses, model.embeds_first)
        assert pad is None or best.layout.total(PartKind.NOOP) == pad
        if best.refuted_rank is not None:
            small = [v for v in values if best.within is None or v[1] <= round(best.within, 9)]
            assert all(v[0] > best.refuted_rank for v in small)


def test_layers_are_not_spread_beyond_memory() -> None:
    """A layer holds 3 in the first stage and 1 in the second: two and two would be even, and hold 8."""
    best = next(frontier(Model(4), v_shape(1, 4), memory=6, in_flight=[3, 1]))
    assert [len(best.layout.layers_of(stage)) for stage in range(2)] == [1, 3]
    assert (best.largest_rank, best.largest_stage, best.refuted_rank, best.refuted_stage) == (4.0, 3.0, None, 2.0)


def test_dense_layers_alone_can_be_too_much() -> None:
    costs = LayerCosts(parameters=PerKind(dense=5.0, moe=0.0), activations=PerKind(dense=0.0, moe=0.0))
    with pytest.raises(DiagnosticError, match=r"S406.*within 4: rank 0 holds 5"):
        next(frontier(Model(3, 1), linear(2, 4), costs, memory=4, in_flight=[2, 1]))


@pytest.mark.parametrize(
    ("model", "placement", "in_flight", "message"),
    [
        (Model(3, mtp=1), linear(1, 4), None, "predictions and head in one stage"),
        (Model(3, mtp=2, losses=3), linear(2, 4), None, "3 losses in 2 stages"),
        (Model(3), linear(2, 4), [1], "1 peaks for 2 stages"),
        (
            Model(3),
            Placement(np.array([[0, 1, 2], [1, 2, 0]], np.int32), (0, 2, 4), 3),
            None,
            "the two pipes of this placement pair each stage with several others",
        ),
    ],
)
def test_what_cannot_be_balanced(model: Model, placement: Placement, in_flight: list[int], message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        next(frontier(model, placement, in_flight=in_flight))
    assert [(d.code, d.message) for d in error.value.diagnostics] == [("S143", message)]


def test_costs_with_many_digits_are_balanced_to_twelve_of_them() -> None:
    costs = LayerCosts(time=PerKind(1 / 3, 1e-9 / 7, 2 / 3, 1e6 / 7, 0.1))
    best = next(frontier(Model(9, 3, 1), loop(2, 4, 2), costs))
    every = [value(layout, loop(2, 4, 2), costs)[0] for layout in every_layout(Model(9, 3, 1), 4)]
    assert best.largest_rank == pytest.approx(min(every), rel=1e-12)
