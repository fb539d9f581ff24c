"""What plans attach: values from text and back, what follows for programs, reports."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from math import lcm
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import schedc
from schedc.cell import CellCosts, PlanOrder, cell_program, stage_shape
from schedc.cli import main
from schedc.compiler import analyse, price
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.parallel import GlobalBatch, Parallel
from schedc.ir.plan import BYTES as BYTES_OF
from schedc.ir.plan import PRODUCTS, Products
from schedc.ir.program import InstructionKind
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.ties import Tie
from schedc.ir.verify_program import verify_program
from schedc.plan import (
    By,
    Capacity,
    CellPlan,
    Drop,
    ExpertSizes,
    Hot,
    Level,
    Method,
    Plan,
    Recompute,
    Topology,
    plan_of,
)
from schedc.plan.counts.layers import moe_layer
from schedc.plan.directives import DIRECTIVES
from schedc.plan.layout.costs import PerKind
from schedc.plan.writer import read_plan, write_plan
from schedc.report.check import to_json as report
from schedc.source import Source
from schedc.step.costs.costs import load_costs
from schedc.step.costs.exchange import (
    Routing,
    choose_method,
    rows,
)
from schedc.syntax.formatter import format_source
from schedc.syntax.plan_words import FORMS, INSIDE, PLAN_WORDS
from support.paths import ROOT
from support.plan_cases import MOE, written
from support.sweeps import swept

FULL = """plan a = dualpipev(P = 2, M = 8) {
  layers 8 dense 1
  experts 64 top 8 groups 8 limit 4 shared 1 width 1408 hidden 2048
  topology nodes 4 x 2 rail 50 GB/s node 400 Gbit/s
  tokens 4096 dtype fp16
  alltoall auto
  cell F & B {
    compute B.mlp.I B.mlp.W F.mlp B.attn.I B.attn.W F.attn
    comm F.dispatch B.dispatch F.combine B.combine
  }
  capacity 1.25 drop position
  hot 3 until imbalance < 1.2
  recompute all medium adaptive(2.0)
  recompute chunk 1 light
  recompute stage [3] full
}
"""


def test_a_plan_becomes_the_values_that_it_says(tmp_path: Path) -> None:
    path = tmp_path / "x.sched"
    path.write_text(FULL)
    plan = plan_of(schedc.compile(path))
    light = Recompute(Level.LIGHT)
    assert plan == Plan(
        experts=ExpertSizes(64, 8, 8, 4, 1, 1408, 2048),
        topology=Topology(4, 2, 50e9, 50e9),
        tokens=4096,
        dtype="fp16",
        method=Method.HIERARCHICAL,
        overlap=True,
        cells=(
            CellPlan(
                "FB",
                ("F.attention", "B.experts.I", "B.experts.W", "F.experts", "B.attention.I", "B.attention.W"),
                ("B.combine", "F.dispatch", "B.dispatch", "F.combine"),
            ),
        ),
        capacity=Capacity(1.25, Drop.POSITION),
        hot=Hot(3, 1.2),
        recompute=(Recompute(Level.MEDIUM, 2.0, By.RANK),) * 2 + (light, Recompute(Level.FULL)),
    )


def test_an_order_by_hand_goes_round(tmp_path: Path) -> None:
    """The order of the language's design begins its compute lane in the middle of a layer; begun elsewhere it runs."""
    path = tmp_path / "x.sched"
    path.write_text(FULL)
    (cell,) = plan_of(schedc.compile(path)).cells
    shape = stage_shape(["moe", "moe"])
    program = cell_program("FB", shape, shape, CellCosts(()), PlanOrder(cell.compute, cell.communication))
    assert len(program.steps) > 2 * len(shape)


def test_everything_that_carries_a_plan_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "x.sched"
    path.write_text(FULL)
    program = schedc.compile(path)
    assert program_from_json(program_to_json(program)) == program
    assert parse_program(print_program(program)) == replace(program, source=None)
    step = price(open_input(path), {})
    schedule = step.schedule
    assert parse_schedule(print_schedule(schedule)) == schedule
    assert plan_of(schedule) == plan_of(program)
    bare = schedc.compile(written(tmp_path, "layers 4"))
    assert (bare.plan, plan_of(bare)) == (Plan(), Plan())
    with pytest.raises(DiagnosticError):
        read_plan("recompute stage [4] light", 4)


experts = st.builds(
    lambda parts, size, top, limit, shared, width, hidden: ExpertSizes(
        parts * size, min(top, limit * size), parts, min(limit, parts), shared, width, hidden
    ),
    st.integers(1, 8), st.integers(8, 32), st.integers(1, 8), st.just(8), st.integers(0, 2), st.integers(0, 4096),
    st.integers(0, 8192),
)  # fmt: skip
levels = (
    st.builds(Recompute, st.sampled_from(Level))
    | st.builds(Recompute, st.sampled_from((Level.LIGHT, Level.FULL)), bubbles=st.just(True))
    | st.builds(Recompute, st.sampled_from((Level.LIGHT, Level.FULL)), st.floats(1, 9), st.just(By.GROUP))
)
factors = st.floats(1, 1e4, exclude_min=True)


@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(
    st.builds(
        Plan,
        experts=experts,
        tokens=st.integers(1, 1 << 20),
        dtype=st.sampled_from(("bf16", "fp32")),
        method=st.sampled_from(Method),
        tied=st.booleans(),
        shard_dense=st.booleans(),
        overlap=st.booleans(),
        products=st.builds(Products, st.sampled_from(PRODUCTS), st.booleans()).filter(lambda x: x != Products("bmm")),
        capacity=st.none() | st.builds(Capacity, factors.map(lambda f: f * 300), st.sampled_from(Drop)),
        hot=st.none() | st.builds(Hot, st.none() | st.integers(1, 4), st.none() | factors, st.booleans()),
        bound=st.none() | factors,
        parallel=st.none()
        | st.builds(
            Parallel,
            st.sampled_from((1, 8)),
            st.sampled_from(("", "attention")),
            dp=st.integers(1, 99),
            zero=st.just(3),
        ),
        batch=st.none() | st.builds(GlobalBatch, st.integers(1, 9), st.integers(1, 99).map(lambda x: 8 * x)),
        recompute=st.just(()) | st.lists(levels, min_size=4, max_size=4).map(tuple),
    ).filter(
        lambda plan: (
            plan.bound is None
            or (
                plan.capacity is None
                and plan.hot is None
                and plan.products not in (Products("padded"), Products("tiles"))
            )
        )
    )
)
def test_the_canonical_text_says_the_same(plan: Plan) -> None:
    text = write_plan(plan)
    assert read_plan(text, 4) == plan
    assert write_plan(read_plan(text, 4)) == text


@given(st.integers(1, 400), st.sampled_from(("GB", "Gbit", "MiB")), st.integers(0, 99))
def test_speeds_survive_the_text(number: int, unit: str, hundredths: int) -> None:
    text = f"topology nodes 2 x 4 rail {number}.{hundredths:02} {unit}/s"
    plan = read_plan(text, 1)
    assert read_plan(write_plan(plan), 1) == plan


def test_forms_of_lines_are_right_and_all_their_words_are_known(tmp_path: Path) -> None:
    assert all(row.form.split()[0] == row.word and row.meaning for row in PLAN_WORDS)
    assert [row.word for row in PLAN_WORDS if row.word not in DIRECTIVES] == [
        "layers", "layout", "costs", "parameters", "activations", "memory",
    ]  # fmt: skip
    assert DIRECTIVES.keys() <= FORMS.keys()
    apart = (
        "layout",
        "memory",
        "parameters",
        "activations",
        "sizes",
        "balance",
        "migrate",
        "slices",
        "parallel",
        "batch",
    )
    several = [form for word, form in FORMS.items() if word not in apart]
    whole = analyse(written(tmp_path, "\n  ".join(several).replace("4 x 8", "8 x 8"), "dualpipev(P = 8, M = 16)"), {})
    silent = [word for word, directive in DIRECTIVES.items() if not any(directive.write(plan_of(whole.schedule)))]
    assert silent == ["overlap", "sizes", "balance", "migrate", "slices", "parallel", "batch"], (
        "a program loses these directives: give them a writer"
    )  # `cell` implies overlap
    held = [FORMS[word] for word in ("layers", "memory", "parameters", "activations", "experts", "tokens")]
    analyse(written(tmp_path, "\n  ".join(held).replace("4096", "512"), "dualpipev(P = 8, M = 16)"), {})
    analyse(written(tmp_path, FORMS["layout"], "1f1b(P = 5, M = 8)"), {})
    bounded = analyse(written(tmp_path, f"layers 5  {FORMS['sizes']}", "1f1b(P = 5, M = 8)"), {})  # no capacity beside
    assert any(DIRECTIVES["sizes"].write(plan_of(bounded.schedule)))
    even = analyse(written(tmp_path, f"layers 5  {FORMS['balance']}", "1f1b(P = 5, M = 8)"), {})  # flat, nothing beside
    assert [*DIRECTIVES["balance"].write(plan_of(even.schedule))] == [FORMS["balance"]]
    moved = analyse(written(tmp_path, f"layers 5  {FORMS['migrate']}", "1f1b(P = 5, M = 8)"), {})  # no capacity beside
    assert [*DIRECTIVES["migrate"].write(plan_of(moved.schedule))] == [FORMS["migrate"]]
    cut = analyse(written(tmp_path, f"layers 4  {FORMS['slices']}"), {})  # no capacity, and no order of a cell beside
    assert any(DIRECTIVES["slices"].write(plan_of(cut.schedule)))
    spread = [FORMS[word] for word in ("parallel", "batch", "experts", "topology")]
    spread_plan = plan_of(
        analyse(written(tmp_path, "\n  ".join(["layers 8", *spread]), "1f1b(P = 8, M = 96)"), {}).schedule
    )
    assert (spread_plan.parallel, spread_plan.batch) == (
        Parallel(8, "attention", 1, 32, 48, 1),
        GlobalBatch(4608, 8192),
    )
    analyse(written(tmp_path, "layers 4\n  recompute full in\n    bubbles"), {})  # a line may be broken anywhere
    assert {*Level, *Method, *Drop, *By, *BYTES_OF, *PerKind._fields} - {"rank", "dtype"} <= INSIDE


def nodes_by_hand(tp: int, ep: int, node: int) -> tuple[int, int] | None:
    """On how many nodes the ranks that share experts lie, and how many on each; None where groups begin inside nodes.

    Devices are counted one by one, for every group of a few nodes.
    """
    group, shapes = tp * ep, set()
    for first in range(0, lcm(group, node), group):
        for part in range(tp):
            on_nodes = Counter((first + part + tp * rank) // node for rank in range(ep))
            shapes.add((len(on_nodes), *set(on_nodes.values())))
    (shape, *others) = shapes
    return None if others or len(shape) > 2 or (node % group and group % node) else (shape[0], shape[1])


def test_ranks_that_share_experts_lie_on_nodes_as_counted_by_hand() -> None:
    """With and without tensor parallel experts, whose ranks lie between those that share experts."""
    shapes = Counter[bool]()
    for tp, ep, node in product((1, 2, 3, 4, 8), (2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 16)):
        expected = nodes_by_hand(tp, ep, node)
        assert Parallel(tp=tp, ep=ep, dp=ep, node=node).shape() == expected, (tp, ep, node)
        assert Parallel(tp=tp, of="attention", ep=ep, dp=ep, node=node).shape() == nodes_by_hand(1, ep, node)
        shapes[expected is None] += 1
    assert min(shapes.values()) > 50


def test_sharded_dense_parameters_need_a_schedule_with_one_copy_of_each_stage(tmp_path: Path) -> None:
    program = schedc.compile(written(tmp_path, "layers 8  shard dense", "dualpipev(P = 2, M = 4)"))
    assert program.plan == Plan(shard_dense=True)
    with pytest.raises(DiagnosticError) as caught:
        schedc.compile(written(tmp_path, "layers 8  shard dense", "dualpipe(P = 2, M = 4)"))
    assert [finding.code for finding in caught.value.diagnostics] == ["S144"]


def test_tied_embeddings_become_sums_of_the_program(tmp_path: Path) -> None:
    program = schedc.compile(written(tmp_path, "layers 6  tied embedding", "1f1b(P = 3, M = 4)"))
    assert program.tied == (Tie((0, 2)),)
    assert "REDUCE 0 tied to 2 with 2 #0" in print_program(program)
    assert plan_of(program).tied
    assert verify_program(program) == []
    with_mtp = schedc.compile(written(tmp_path, 'layout "Et|tm|L" tied embedding', "1f1b(P = 3, M = 4)"))
    assert with_mtp.tied == (Tie((0, 1, 2)),)
    assert schedc.compile(written(tmp_path, "layers 6 tied embedding", "1f1b(P = 1, M = 4)")).tied == ()
    both = written(tmp_path, "layers 6 tied embedding", "dualpipe(P = 2, M = 4)")
    assert not (schedc.compile(both).stage2[schedc.compile(both).kind == InstructionKind.REDUCE] >= 0).any()
    path = written(tmp_path, 'layout "Et|t|tm|L"  tied embedding', "dualpipe(P = 4, M = 8)")
    with pytest.raises(DiagnosticError) as error:
        schedc.compile(path)
    assert [(d.code, d.position[1:]) for d in error.value.diagnostics] == [("S303", (2, 23))]


def test_a_rank_may_decide_where_there_is_no_collective(tmp_path: Path) -> None:
    for lines in (
        "recompute all medium adaptive(2.0) by rank",
        "topology nodes 1 x 1 recompute full adaptive(2) by rank",
    ):
        plan = plan_of(schedc.compile(written(tmp_path, f"layers 4 experts 64 top 8 {lines}")))
        assert {level.by for level in plan.recompute} == {By.RANK}
    plan = plan_of(schedc.compile(written(tmp_path, f"{MOE} recompute adaptive(2.0)")))
    assert set(plan.recompute) == {Recompute(Level.FULL, 2.0, By.GROUP)}


def test_a_pair_with_a_stage_of_no_layer_is_its_other_half(tmp_path: Path) -> None:
    """Stage 2 is a padding; its pairs last as long as the cells of one op on stages of as many layers."""
    costs = load_costs(ROOT / "examples" / "costs" / "cells.toml")
    lines = "layers 3 pad 1 at [2]  experts 8 top 2"
    path = written(tmp_path, f"overlap auto  {lines}", "dualpipev(P = 2, M = 4)")
    kinds = report(analyse(path, {}, costs))["cells"]["kinds"]
    times = {(kind["kind"], *kind["stages"]): kind["duration"] for kind in kinds}
    assert (times["FB", 1, 2], times["FB", 2, 1]) == (times["F", 0, 0], times["B", 3, 3])
    by_hand = f"cell F & B {{ compute F.experts B.experts }}  {lines}"
    analyse(written(tmp_path, by_hand, "dualpipev(P = 2, M = 4)"), {}, costs)


# ---- what the commands tell


def test_reports_tell_what_is_attached(tmp_path: Path) -> None:
    path = tmp_path / "x.sched"
    path.write_text(FULL)
    facts = report(analyse(path, {}))["plan"]
    moved = rows("hierarchical", Routing(64, 8, 8, 4), Topology(4, 2))
    assert moved is not None
    assert facts["alltoall"]["bytes_per_token"]["hierarchical"] == {
        "rail": moved.rail * 4096,
        "node": moved.node * 4096,
    }
    assert facts["capacity"] == {"factor": 1.25, "drop": "position", "rows": 640}
    assert facts["hot"]["break_even_rows"] == 3168
    assert facts["hot"]["held_bytes"] is None
    assert [(row["level"], row["moe_layers"]) for row in facts["recompute"]] == [
        ("medium", 1), ("medium", 2), ("light", 2), ("full", 2)
    ]  # fmt: skip
    moe = ExpertSizes(64, 8, 8, 4, 1, 1408, 2048)
    assert (
        facts["recompute"][3]["bytes_saved"] == 2 * 4096 * moe_layer(Plan(dtype="fp16"), moe).saving(Level.FULL).bytes
    )
    run = lambda *words: CliRunner().invoke(main, [*words])  # noqa: E731
    said = run("check", str(path)).output
    assert "alltoall hierarchical: a token's experts share nodes" in said
    assert "overlap F & B in the order of the plan\ncapacity 1.25 drop position: 640 rows of an expert" in said
    assert "hot: none, with a capacity all ranks have equally many rows\n" in said
    assert json.loads(run("check", str(path), "--json").output)["plan"] == facts
    laid = run("layout", "--layers", "8", "--dense", "1", "--schedule", str(path), "--json")
    assert json.loads(laid.output)["plan"]["recompute"] == facts["recompute"]
    assert "plan" not in report(analyse(written(tmp_path, "layers 4"), {}))
    refused = run("check", written(tmp_path, f"{MOE}\n  hot 9"), "--json")
    assert json.loads(refused.stdout.splitlines()[0])["diagnostics"][0]["code"] == "S151"


def test_plans_are_formatted() -> None:
    loose = (
        FULL.replace("compute B.mlp.I", "compute   B.mlp.I")
        .replace("hot 3 until", "hot 3   until")
        .replace("= d", "=d")
    )
    assert format_source(Source("x", loose)) == FULL
    assert format_source(Source("x", FULL)) == FULL


def test_the_documents_say_what_is_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guide" / "plans.md").read_text(encoding="utf-8")
    block, *_ = re.findall(r"```sched\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "x.sched"
    path.write_text(block, encoding="utf-8")
    plan = plan_of(schedc.compile(path))
    assert plan == plan_of(schedc.compile(ROOT / "examples" / "04_plan" / "dsv3.sched"))
    (console, *_) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    command, *expected = console.splitlines()
    printed = CliRunner().invoke(main, ["check", str(ROOT / command.split()[-1])]).output.splitlines()
    assert [line for line in expected if line not in (*printed, "...")] == []
    for nodes, top, count, method in re.findall(r"^\| (\d+), (\d+), (\d+) \|.*\| (\w+) \|$", text, re.MULTILINE):
        assert choose_method(Routing(int(count), int(top)), Topology(int(nodes), 8)).method == method


def test_a_line_for_a_stage_goes_before_one_for_all_wherever_it_stands() -> None:
    special, general = "recompute stage [1] full  slices stage [1] 3", "recompute all light  slices 2"
    plans = [read_plan(text, 2) for text in (f"{special}  {general}", f"{general}  {special}")]
    assert plans[0] == plans[1]
    assert [level.level for level in plans[0].recompute] == [Level.LIGHT, Level.FULL]
    assert plans[0].slices == (2, 3)
