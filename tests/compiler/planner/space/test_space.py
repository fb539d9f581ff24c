"""The space of plans: its plans are legal, none is twice, sizes are asked of files, and an empty one says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from schedc.diagnostics import RequestError
from schedc.elaborate.sizes import bind_sizes, meets_requirements
from schedc.planner.answers.runs_on import runs_on
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.layouts import ends_layout
from schedc.planner.price.priced import read_back
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import OUTER_AXES, Prefix
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.nothing_legal import nearest_batches, refuse_nothing_legal
from schedc.planner.space.schedules import all_schedules
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from support.short_search import short_search
from support.sweeps import swept


def space_of(
    model: str = "qwen3-30b-a3b",
    devices: int = 64,
    batch: int = 256,
    conditions: tuple[str, ...] = (),
    kind: str = "standard",
) -> PlanSpace:
    required = tuple(map(read_condition, conditions))
    return PlanSpace.of(open_model(model), open_cluster("h100", devices), batch, 4096, kind, required)


@pytest.mark.sweep
@pytest.mark.slow
def test_plans_are_legal_and_distinct() -> None:
    space = space_of(conditions=("pp in 2, 4", "zero == 1", "tp <= 2", "microbatch == 2"))
    plans = [block.axes(int(number)) for block in space.blocks() for number in block.numbers()]
    assert len(plans) == len(set(plans)) == sum(map(len, space.blocks())) > 1000
    for plan in plans[:: swept(37, 111)]:
        assert (plan.devices, plan.batch) == (64, 256)
        assert plan.tp * plan.cp * plan.dp % plan.ep == 0
        choice = space.choice(plan.schedule)
        sizes = choice.sizes(plan.pp, plan.microbatches, plan.vpp, plan.limit)
        assert sizes is not None
        assert meets_requirements(choice.tree, bind_sizes(choice.tree, sizes))
        placement = choice.placement(plan.pp, plan.microbatches, plan.vpp)
        assert placement is not None
        assert placement.stages == plan.stages
        assert not plan.overlap or (choice.has_pairs and plan.ep > 1)
        assert plan.ep > 1 or plan.alltoall == "flat"
        block = space.block([Prefix(zero=0, **{name: getattr(plan, name) for name in OUTER_AXES})])
        assert plan in {block.axes(int(number)) for number in block.numbers()}


def test_states_are_sharded_over_replicas() -> None:
    for model, sizes, zeros in (
        ("llama-3.1-8b", "dp == 1 and cp == 1", {1}),
        ("llama-3.1-8b", "dp == 2 and cp == 1", {1, 2, 3}),
        ("qwen3-30b-a3b", "dp == 1 and cp == 1 and tp == 2 and ep == 1", {1, 2, 3}),
    ):
        blocks = space_of(model, 16, 32, (f"{sizes} and pp == {8 if 'tp == 2' in sizes else 4}",)).blocks()
        assert {zero for block in blocks for zero in block.inner.zeros} == zeros, sizes


def test_a_wide_space_has_the_standard_one() -> None:
    standard, wide = (space_of(kind=kind, conditions=("pp == 4", "tp == 2")) for kind in ("standard", "wide"))
    assert set(standard.prefixes()) < set(wide.prefixes())
    assert standard.raw < wide.raw


ENDS = [
    (30, 8, 4, {"ends"}),  # 32 parts, embedding and head among them
    (31, 8, 4, set()),
    (30, 4, 4, {"even", "balanced", "ends"}),
    (30, 8, 2, {"even", "balanced", "ends"}),
    (30, 4, 3, {"even", "balanced"}),
]


@pytest.mark.parametrize(("layers", "pp", "vpp", "layouts"), ENDS)
def test_embedding_and_head_count_as_layers(layers: int, pp: int, vpp: int, layouts: set[str]) -> None:
    """Every stage has equally many parts. A stage without layers has the embedding or the head alone."""
    wanted = (f"pp == {pp}", f"vpp == {vpp}", "tp == 1", "zero == 1", "microbatch == 1", "schedule == interleaved_1f1b")
    space = space_of("llama-3.1-8b", conditions=wanted)
    space = replace(space, model=replace(space.model, layers=layers), _orders={})
    plans = [block.axes(int(number)) for block in space.blocks() for number in block.numbers()]
    assert {plan.layout for plan in plans} == layouts
    if "ends" in layouts:
        parts = [len(stage) for stage in ends_layout(space.model, pp * vpp).stages]
        assert parts == [(layers + 2) // (pp * vpp)] * (pp * vpp)


def test_plans_whose_embedding_counts_as_a_layer_open_and_export() -> None:
    """Searches find such plans, `check` reads their step from the files, and exports take those without pairs."""
    required = ("pp == 8", "vpp == 4", "tp == 1", "zero == 1", "recompute == none", "ep == 8", "cp == 1")
    space = space_of(conditions=(*required, "schedule in interleaved_1f1b, interleaved_overlap"))
    model = replace(space.model, layers=30)
    space = replace(space, model=model, _orders={})
    with short_search():
        plans = search(space, PlanProblem(model, space.cluster, 256), SearchOptions(top=3)).plans
        assert {plan.axes.layout for plan in plans} == {"ends"}
        for plan in plans:
            assert read_back(plan.priced.planned).predicted.makespan == pytest.approx(plan.priced.makespan, rel=1e-12)
            assert set(runs_on(plan.priced).values()) <= {None} or plan.axes.overlap


def test_what_schedules_say_of_themselves() -> None:
    choices, left_out = all_schedules()
    by_name = {choice.name: choice for choice in choices}
    assert {name for name, choice in by_name.items() if choice.by_policy} == {"adaptive_pipe", "zb_auto", "zb_greedy"}
    assert by_name["dualpipev"].has_pairs
    assert by_name["dualpipev"].splits
    assert not by_name["1f1b"].has_pairs
    assert not by_name["1f1b"].splits
    assert not by_name["zbh1_overlap"].has_pairs  # its pairs have a weight gradient, and no exchange beside a backward
    assert by_name["zb_auto"].limits(8, 32, 1) == (8, 16)
    assert by_name["hanayo"].sizes(4, 8, 4) == {"P": 4, "M": 8, "w": 2}
    assert by_name["hanayo"].limits(4, 8, 3) == ()
    assert by_name["dualpipev"].limits(4, 7, 2) == ()
    assert {each.schedule for each in left_out} == {"chimera", "dualpipe", "seq1f1b"}


def test_schedules_of_a_folder_take_part(tmp_path: Path) -> None:
    text = """sched 1
schedule NAME(P: ranks = 2, M: microbatches = 4) {
  REQUIRE
  place linear
  rank r { phase all { repeat M { F }  repeat M { B } } }
}
"""
    (tmp_path / "a.sched").write_text(text.replace("NAME", "mine").replace("REQUIRE", "require M % 4 == 0"))
    (tmp_path / "b.sched").write_text(text.replace("NAME", "gpipe").replace("REQUIRE", ""))
    (tmp_path / "c.sched").write_text("sched 1\nschedule broken(")
    (tmp_path / "d.sched").write_text(text.replace("NAME", "never").replace("REQUIRE", "require M < 0"))
    stuck = text.replace("NAME", "stuck").replace("REQUIRE", "").replace("M { F }", "M { X }")
    stuck = stuck.replace("M { B }", "M { F }").replace("M { X }", "M { B }")
    (tmp_path / "e.sched").write_text(stuck)
    choices, left_out = all_schedules(tmp_path)
    assert [choice.name for choice in choices if not choice.shipped] == ["mine"]
    reasons = {each.schedule: each.reason for each in left_out}
    assert {"b.sched", "c.sched", "never", "stuck"} <= set(reasons)
    assert "`require`" in reasons["never"]
    assert "gpipe" in reasons["b.sched"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"batch": 7, "devices": 6144}, "7 sequences are dp*microbatch*microbatches"),
        ({"conditions": ("pp >= 4", "pp < 4")}, "--require 'pp < 4'"),
        ({"conditions": ("tp == 1", "overlap and not overlap")}, "--require 'overlap and not overlap'"),
        (
            {"conditions": ("pp == 2", "schedule == zbv and vpp == 1")},
            "--require 'schedule == zbv and vpp == 1'",
        ),
        ({"model": "qwen3-8b", "conditions": ("ep > 1",)}, "--require 'ep > 1'"),
    ],
)
def test_an_empty_space_names_what_took_the_last(asked: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError) as raised:
        refuse_nothing_legal(space_of(**asked))  # type: ignore[arg-type]
    (finding,) = raised.value.diagnostics
    assert finding.code == "S712"
    assert words in finding.message
    assert finding.help


def test_values_of_the_axes_of_a_condition_that_none_meets() -> None:
    with pytest.raises(RequestError) as raised:
        refuse_nothing_legal(space_of(conditions=("pp == 2", "tp == 7")))
    assert raised.value.diagnostics[0].help.startswith("tp is one of 1, 2, 4, ")
    with pytest.raises(RequestError) as raised:
        refuse_nothing_legal(space_of(conditions=("pp == 2", "pp == 4")))
    assert raised.value.diagnostics[0].help == "leave the condition out, or weaken an earlier condition"


@pytest.mark.parametrize(("moe", "placed"), [({"every": 2}, False), ({"first_dense": 2}, True)])
def test_dense_layers_lie_in_front(moe: dict[str, int], placed: bool) -> None:
    space = space_of(conditions=("pp == 2", "tp == 1", "cp == 1"))
    assert space.model.moe is not None
    mixed = replace(space, model=replace(space.model, moe=replace(space.model.moe, **moe)))  # type: ignore[arg-type]
    if placed:
        refuse_nothing_legal(mixed)
        return
    with pytest.raises(RequestError) as raised:
        refuse_nothing_legal(mixed)
    (finding,) = raised.value.diagnostics
    assert finding.code == "S712"
    assert "a plan has them in front" in finding.message


def test_nearest_batches_have_a_plan() -> None:
    space = space_of(devices=3072, batch=1000, conditions=("pp <= 4", "tp == 1", "cp == 1"))
    for batch in nearest_batches(space):
        assert next(space_of(devices=3072, batch=batch).blocks(), None) is not None
