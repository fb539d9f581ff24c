"""Layout strings, paddings, layer costs and `schedc layout`: what is read, refused and where, and printed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.plan.layout.layer_costs import COSTS
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.ir.ops import OpKind
from schedc.load.library import open_schedule
from schedc.plan.layout import (
    LayerCosts,
    Layout,
    Model,
    ModelPart,
    PartKind,
    PerKind,
    even,
    padded,
    parse_layer_costs,
    parse_layout,
    write_layout,
)
from schedc.plan.layout.compare import measure, peak_in_flight
from schedc.source import Source
from support.sweeps import swept


def letters(layout: Layout) -> str:
    """Every part by its first letter, noop as ``-``; stages between bars."""
    short = {
        PartKind.EMBEDDING: "E",
        PartKind.DENSE: "t",
        PartKind.MOE: "t",
        PartKind.MTP: "m",
        PartKind.HEAD: "L",
        PartKind.NOOP: "-",
        PartKind.MTP_EMBEDDING: "e",
    }
    return "|".join("".join(short[part.kind] for part in parts) for parts in layout.stages)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("Et*3|(tt|)*29,m|L", "Ettt|" + "tt|" * 29 + "m|L"),  # Megatron's own examples
        ("E,(t)*13|(t)*14,L", "E" + "t" * 13 + "|" + "t" * 14 + "L"),
        ("E|(tt|)*2,(t|)*4,mL", "E|tt|tt|t|t|t|t|mL"),
        ("E||t|L", "E||t|L"),
        ("Ett|((t|)*2tt|)*2mL", "Ett|t|t|tt|t|t|tt|mL"),
        ("(E(tt|(tt|m|)))L", "Ett|tt|m|L"),
        (" E t * 2 |\n\tnoop*2 (t noop)*2\n| noop L ", "Ett|--t-t-|-L"),
        ("noop Et|L noop", "-Et|L-"),
    ],
)
def test_layout_strings(text: str, expanded: str) -> None:
    layout = parse_layout(text)
    assert letters(layout) == expanded
    numbers = [number for stage in range(len(layout.stages)) for number in layout.layers_of(stage)]
    assert numbers == list(range(expanded.count("t")))
    assert parse_layout(write_layout(layout)) == layout


def refused(text: str, **known: int) -> list[tuple[str, int, int]]:
    with pytest.raises(DiagnosticError) as error:
        parse_layout(text, **known)
    return [diagnostic.position for diagnostic in error.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("Et*3|x t*2 y2|L", [("S140", 1, 6), ("S140", 1, 12)]),
        ("E t*0 |*3 tL)", [("S140", 1, 4), ("S140", 1, 8), ("S140", 1, 13)]),
        ("E\n (t|(t|L", [("S140", 2, 2), ("S140", 2, 5)]),
        ("Et*|L", [("S140", 1, 3)]),
        ("*3E()t*2*2L", [("S140", 1, 1), ("S140", 1, 4), ("S140", 1, 9)]),
        ("t|L", [("S142", 1, 1)]),
        ("Et|t", [("S142", 1, 5)]),
        ("E|L ", [("S142", 1, 4)]),
        ("", [("S142", 1, 1), ("S142", 1, 1), ("S142", 1, 1)]),
        ("tE|L", [("S142", 1, 2)]),
        ("noop|Et|L", [("S142", 1, 6)]),
        ("Et|L|t", [("S142", 1, 4), ("S142", 1, 6)]),
        ("Et|tEmtL", [("S142", 1, 5), ("S142", 1, 7)]),
        ("EtLm", [("S142", 1, 4)]),
        ("EtLL", [("S142", 1, 4)]),
        ("Em t*3 L", [("S142", 1, 4)]),  # once, not for each of the three
        ("Etm|LL", [("S142", 1, 6)]),  # one stage
        ("Etm|L|L|", [("S142", 1, 7)]),  # the last L is not in the last stage
        ("Etm|L|L|L", [("S142", 1, 9)]),
        ("Etmm|L|L", [("S142", 1, 8)]),  # two losses of three outputs
        ("Et|L|m|L", [("S142", 1, 6)]),
        ("eEtm|L", [("S142", 1, 1), ("S142", 1, 2)]),
        ("Eetm|Le", [("S142", 1, 7)]),
        ("Et|em|L", [("S142", 1, 4)]),
        ("Ete|m|L", [("S142", 1, 3)]),
        ("Eet|L", [("S142", 1, 2)]),
    ],
)
def test_errors_point_into_the_string(text: str, positions: list[tuple[str, int, int]]) -> None:
    assert refused(text) == positions


@pytest.mark.parametrize(
    "text",
    ["((((t*9999)*9999)*9999)*9999)", "Et*99999999999999999999999|L", "(" * 5000, "(t|)*65536" * 2,
     "(" * 20 + "t" + "*9)" * 20, "t" * 200_000],
)  # fmt: skip
def test_hostile_strings_end_at_once(text: str) -> None:
    begin = time.process_time()
    assert refused(text)[0][0] == "S141"
    assert time.process_time() - begin < 2


@pytest.mark.sweep
@given(
    st.text(st.sampled_from("EetmL|(),*0123 \nnopx\t\x00é*"), max_size=30) | st.text(max_size=20),
    st.none() | st.integers(-2, 9),
)
@settings(max_examples=swept(400, 150))
def test_any_text_is_read_or_refused_at_a_place_in_it(text: str, dense: int | None) -> None:
    try:
        layout = parse_layout(text, dense=dense)
    except DiagnosticError as error:
        for found in error.diagnostics:
            span = found.primary.span
            assert found.code in ("S140", "S141", "S142", "S143")
            assert found.source is None or span.column <= len(found.source.line(span.line)) + 1
        return
    assert parse_layout(write_layout(layout), dense=dense) == layout


@pytest.mark.parametrize(
    ("text", "crossing"),
    [
        ("Et|t|L", (1, 1)),
        ("Et|m||L", (1, 2, 2)),
        ("Et|m|L|L", (1, 2, 1)),
        ("Eet|t|m|L|L", (2, 2, 2, 1)),
        ("Etm|mL|L|L", (2, 2, 1)),  # the decoder's and m 0's; m 0's and m 1's; m 1's
        ("Eet|m|m|L", (2, 3, 3)),
        ("EetmL|L", (1,)),
    ],
)
def test_states_that_cross_boundaries(text: str, crossing: tuple[int, ...]) -> None:
    assert parse_layout(text).crossing == crossing


def test_heads_share_time_and_each_holds_its_table() -> None:
    costs = LayerCosts(PerKind(0.5, 1, 1, 2, 3), PerKind(20, 1, 1, 30, 8), PerKind(0, 1, 1, 1, 4), p2p=0.1)
    layout = parse_layout("Et|tmL|L")
    assert costs.per_stage(layout).tolist() == [1.5, 4.5, 1.5]
    assert costs.per_stage(layout, "activations").tolist() == [1, 4, 2]
    assert costs.per_stage(layout, "parameters").tolist() == [21, 39, 8]
    first = parse_layout("Eet|tmL|L")
    assert costs.per_stage(first, "parameters").tolist() == [21, 19, 8]  # without a table of the embedding
    assert costs.parameters_in(first).sum(axis=1).tolist() == [21, 19, 8]
    assert (costs.of(layout).p2p, costs.of(first).p2p) == (0.1, 0.2)
    assert layout.model == Model(2, None, 1, losses=2)
    assert first.model == Model(2, None, 1, losses=2, embeds_first=True)


@pytest.mark.parametrize("numbers", [(3, None, 1, 3), (3, None, 0, 1, True)])
def test_models_that_are_none(numbers: tuple[int, None, int, int, bool]) -> None:
    with pytest.raises(DiagnosticError, match="S143"):
        Model(*numbers)


def test_losses_by_number_of_layers() -> None:
    assert write_layout(even(Model(2, mtp=1, losses=2), 4)) == "Et|t|mL|L"
    with pytest.raises(DiagnosticError, match=r"S143.*2 losses in stages of their own"):
        even(Model(4, mtp=1, losses=2), 4)


def test_the_number_of_layers_is_checked() -> None:
    assert refused("Ett|tL", layers=4) == [("S143", 1, 7)]
    assert refused("Ett|tL", dense=4) == [("S143", 1, 7)]
    layout = parse_layout("Ett|tL", layers=3, dense=2)
    assert layout.model == Model(3, 2)
    assert layout.stages[1][0] == ModelPart(PartKind.MOE, 2)


def test_a_layout_made_by_hand_is_checked_too() -> None:
    with pytest.raises(DiagnosticError, match="dense number 1 where 0 is due"):
        Layout(((ModelPart(PartKind.EMBEDDING), ModelPart(PartKind.DENSE, 1), ModelPart(PartKind.HEAD)),))
    mixed = Layout(
        (
            (ModelPart(PartKind.EMBEDDING), ModelPart(PartKind.MOE, 0)),
            (ModelPart(PartKind.DENSE, 1), ModelPart(PartKind.HEAD)),
        )
    )
    assert mixed.layers == 2
    with pytest.raises(DiagnosticError, match=r"S143.*a dense layer after a MoE layer"):
        _ = mixed.model


PARTS = st.lists(st.lists(st.sampled_from("tt-"), max_size=9), min_size=1, max_size=12)


@pytest.mark.slow
@pytest.mark.sweep
@given(PARTS, st.integers(0, 2), st.integers(0, 5))
@settings(max_examples=swept(200, 80))
def test_every_layout_is_written_and_read_back(decoder: list[list[str]], mtp: int, dense: int) -> None:
    rows = ["".join(row) for row in decoder]
    rows[0] = "E" + rows[0]
    rows[-1] += "t" + "m" * mtp + "L"
    layout = parse_layout("|".join(rows).replace("-", " noop "))
    dense = min(dense, layout.layers)
    layout = parse_layout(write_layout(layout), dense=dense)
    assert letters(layout) == "|".join(rows)
    assert parse_layout(write_layout(layout), dense=dense) == layout


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("last", "Ettt|ttt|tt-L"),
        ("first", "E-tt|ttt|tttL"),
        ([4], "Ettt|t-t|tttL"),
    ],
)
def test_paddings(at: str | list[int], expected: str) -> None:
    layout = padded(Model(8, 2, 0), 3, 1, at)
    assert letters(layout) == expected
    assert [part.number for held in layout.stages for part in held if part.kind is PartKind.MOE] == [2, 3, 4, 5, 6, 7]
    assert letters(even(Model(8, mtp=1), 3)) == "Ettt|ttt|ttmL"
    assert letters(even(Model(1), 3)) == "Et||L"


@pytest.mark.parametrize(
    ("model", "stages", "pad", "at", "message"),
    [
        (Model(61), 16, 2, "last", "61 layers and 2 paddings are 63 places, which 16 stages cannot share equally"),
        (Model(7), 4, 1, [3, 4], "1 paddings at 2 different places"),
        (Model(7), 4, 1, [8], "a padding at place 8 of 8"),
        (Model(7), 4, 1, "end", "no places are called `end`"),
        (Model(7), 4, -3, "last", "-3 paddings"),
        (Model(7), 0, 1, "last", "0 stages"),
    ],
)
def test_paddings_that_do_not_fit(model: Model, stages: int, pad: int, at: str | list[int], message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        padded(model, stages, pad, at)
    (found,) = error.value.diagnostics
    assert (found.code, found.message) == ("S143", message)


def test_models_that_do_not_exist() -> None:
    for layers, dense, mtp in ((0, None, 0), (4, 5, 0), (4, -1, 0), (4, 1, -1), (10**6, None, 0)):
        with pytest.raises(DiagnosticError, match="S143"):
            Model(layers, dense, mtp)


def test_layer_costs_of_a_file_and_options() -> None:
    costs = LayerCosts.from_options(
        ["embedding=0.25", "activations.moe=2", "p2p=0.1", "moe = 1.5"], parse_layer_costs(Source("costs.toml", COSTS))
    )
    assert costs.time == PerKind(0.25, 1.0, 1.5, 1.0, 0.9)
    assert costs.parameters == PerKind(0.0, 0.0, 3.0, 0.0, 0.0)
    assert costs.activations == PerKind(0.0, 1.0, 2.0, 1.0, 0.0)
    of_stages = costs.of(parse_layout("Et noop|ttL", dense=1))
    assert (of_stages.F, of_stages.W, of_stages.p2p) == ((1.25, 3.9), (0.625, 1.95), 0.1)
    assert of_stages.activation == (1.0, 4.0)


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (COSTS.replace("moe = 1.4", "moa = 1.4"), [("S401", 4, 1)]),
        (COSTS.replace("0.9", "-0.9"), [("S402", 5, 1)]),
        (COSTS.replace("0.9", "[1.0, 2.0]"), [("S402", 5, 1)]),
        (COSTS.replace("[ops]", "[op]"), [("S401", 10, 1)]),
        (COSTS.replace("[time]", "parameters = 1\n[time]").replace("[parameters]\nmoe = 3.0\n", ""), [("S402", 3, 1)]),
        (COSTS.replace("layer-costs", "costs"), [("S405", 1, 1)]),
        (COSTS.replace("head = ", "head : "), [("S405", 5, 6)]),
    ],
)
def test_errors_of_cost_files(text: str, positions: list[tuple[str, int, int]]) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_layer_costs(Source("costs.toml", text))
    assert [diagnostic.position for diagnostic in error.value.diagnostics] == positions


def test_errors_of_cost_options() -> None:
    with pytest.raises(DiagnosticError) as error:
        LayerCosts.from_options(["moe", "mo=1", "weights.moe=1", "moe=much", "head=nan"])
    assert [d.code for d in error.value.diagnostics] == ["S403", "S401", "S401", "S402", "S402"]


@pytest.mark.parametrize(("name", "sizes"), [("interleaved_1f1b", {"P": 3, "M": 6, "v": 2}), ("1f1b", {"P": 4, "M": 6}),
                                             ("zbh1", {"P": 3, "M": 5})])  # fmt: skip
def test_peaks_are_those_of_a_walk_through_the_order(name: str, sizes: dict[str, int]) -> None:
    schedule = legal_schedule(open_schedule(name), sizes)
    most = [0] * schedule.stages
    for rank in range(schedule.ranks):
        held = dict.fromkeys(range(schedule.stages), 0)
        for op in schedule.ops(rank):
            held[op.stage] += {OpKind.F: 1, OpKind.I: 0}.get(op.kind, -1)
            most[op.stage] = max(most[op.stage], held[op.stage])
    assert peak_in_flight(schedule).tolist() == most


@pytest.mark.parametrize("microbatches", [16, 32, 48, 54, 64])
def test_the_published_case(microbatches: int) -> None:
    """Lmax*M + (P-1)*Lmax/v, times F + I + W: exact where every place is taken; 61 layers do better in both."""
    interleaved = legal_schedule(open_schedule("interleaved_1f1b"), {"P": 8, "M": microbatches, "v": 2})
    one_chunk = legal_schedule(open_schedule("1f1b"), {"P": 8, "M": microbatches})
    costs = LayerCosts()
    full = [measure(even(Model(64), s.stages), s, costs).makespan for s in (interleaved, one_chunk)]
    formula = [3 * (8 * microbatches + 7 * 8 / v) for v in (2, 1)]
    assert full == formula
    padding = measure(padded(Model(61), 16, 3), interleaved, costs)
    uneven = measure(even(Model(61), 8), one_chunk, costs)
    assert padding.load.tolist() == [8.0] * 7 + [5.0]
    assert padding.makespan <= formula[0]
    assert uneven.makespan <= formula[1]
    if microbatches == 54:
        assert round(formula[1] / formula[0] - 1, 3) == 0.061
        assert round(uneven.makespan / padding.makespan - 1, 3) == 0.057


def test_memory_is_parameters_and_the_peak_of_activations() -> None:
    schedule = legal_schedule(open_schedule("1f1b"), {"P": 3, "M": 5})
    costs = LayerCosts(parameters=PerKind(2.0, 10.0, 0.0, 0.0, 5.0), activations=PerKind(0.0, 1.0, 0.0, 0.0, 0.5))
    measured = measure(even(Model(4), 3), schedule, costs)
    assert measured.memory.tolist() == [2 + 20 + 3 * 2, 10 + 2 * 1, 10 + 5 + 1 * 1.5]
    assert np.array_equal(measured.load, [2.0, 1.0, 1.0])
