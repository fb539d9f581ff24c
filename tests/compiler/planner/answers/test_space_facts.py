"""The table of a space is what its code leaves out: no plan has a value that it names, and each other value has one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.model.spread import RANK_ORDER, Spread
from schedc.planner.answers.space_facts import LINE, SpaceFact, axis_ends, space_facts
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price import plan_lines
from schedc.planner.space import axis_values
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.syntax.plan_words import PlanWord
from support.random_plans import random_planned
from support.written_plans import GPT2

MODEL, CLUSTER = open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16)
PROBLEM = PlanProblem(MODEL, CLUSTER, 64)
CONDITIONS = ("pp <= 4", "cp == 1", "microbatch <= 2 and zero == 1 and tp < 8", "schedule in 1f1b, 1f1b_overlap, zbv")


def space_of(*conditions: str, kind: str = "standard") -> PlanSpace:
    return PlanSpace.of(MODEL, CLUSTER, 64, 4096, kind, tuple(map(read_condition, conditions)))


def values(facts: tuple[SpaceFact, ...], axis: str, why: str | None = None) -> set[object]:
    """The values of an axis that plans have, or those that are left out for a reason that begins so."""
    rows = (fact for fact in facts if fact.axis == axis and (fact.why.startswith(why) if why else fact.used))
    return {value for fact in rows for value in fact.values}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["standard", "wide"])
def test_no_plan_has_what_the_table_leaves_out_and_all_else_has_one(kind: str) -> None:
    space = space_of(*CONDITIONS, kind=kind)
    facts = space_facts(space, PROBLEM)
    plans = [block.axes(int(number)) for block in space.blocks() for number in block.numbers()]
    for axis in ("tp", "cp", "pp", "vpp", "ep", "microbatch", "zero", "dp", "schedule", "limit", "layout", "alltoall"):
        there = {getattr(plan, axis) for plan in plans}
        assert values(facts, axis) == there
        left = [value for fact in facts if fact.axis == axis and not fact.used for value in fact.values]
        assert not there & set(left)
        assert len(left) == len(set(left))
    assert values(facts, "recompute") == {(plan.recompute, plan.where) for plan in plans}
    assert values(facts, "overlap") == {plan.overlap for plan in plans}
    assert values(facts, "vpp", "no space has more than 8 stages") == set(range(9, 49))
    assert values(facts, "ep", "ep divides tp*cp*dp") == {32, 64, 128}
    assert values(facts, "zero", "--require 'microbatch <= 2 and zero == 1") >= {2, 3}
    assert "zbv" in values(facts, "schedule")
    assert "zbh1" in values(facts, "schedule", "--require 'schedule in 1f1b")
    assert values(facts, "schedule", "it cuts microbatches into segments") == {"seq1f1b"}


def test_a_value_that_an_axis_gains_is_listed_and_its_law_names_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    law = axis_values.ValueLaw("planted", lambda size, _: size != 4, chosen=True)
    rules = [
        rule._replace(candidates=lambda _: (1, 2, 4, 16), laws=(law,)) if rule.axis == "microbatch" else rule
        for rule in axis_values.RULES
    ]
    monkeypatch.setattr(axis_values, "RULES", tuple(rules))
    facts = space_facts(space_of("pp == 1 and tp == 1"), PROBLEM)
    assert values(facts, "microbatch") == {1, 2}
    assert values(facts, "microbatch", "planted") == {4}
    assert values(facts, "microbatch", "--require") == {16}


@pytest.mark.slow
def test_a_line_that_plans_gain_is_listed_until_plan_files_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    words: set[str] = set()
    for _ in range(400):
        if words < plan_lines.USED and (drawn := random_planned(rng)) is not None:
            lines = drawn[3].plan_file("any", 1e12).partition("plan any")[2].splitlines()
            words |= {line.split()[0] for line in lines if line.startswith("  ")}
    assert words == plan_lines.USED
    row = PlanWord("planted", "SETTING", "planted", "a line of a test")
    monkeypatch.setattr(plan_lines, "PLAN_WORDS", (*plan_lines.PLAN_WORDS, row))
    facts = space_facts(space_of("pp == 1 and tp == 1"), PROBLEM)
    assert values(facts, LINE, "a line of a test") == {"planted"}
    assert {"offload", "hot"} < {value for fact in facts if fact.axis == LINE for value in fact.values}
    monkeypatch.setattr(plan_lines, "USED", plan_lines.USED | {"planted"})
    assert not values(space_facts(space_of("pp == 1 and tp == 1"), PROBLEM), LINE, "a line of a test")


def test_an_axis_that_ends_at_a_plan_is_named() -> None:
    space = space_of("pp == 4 and tp == 1")
    facts = space_facts(space, PROBLEM)
    block = next(space.blocks())
    plan = replace(block.axes(int(block.numbers()[0])), vpp=4, microbatch=2, zero=1)
    assert list(axis_ends(facts, plan, ())) == ["vpp 4 is the largest tried", "zero 1 is the smallest tried"]
    assert list(axis_ends(facts, plan, ("vpp",))) == ["zero 1 is the smallest tried"]
    ruled_out = space_facts(space_of("pp == 4 and tp == 1", "microbatch <= 2 and zero > 1"), PROBLEM)
    assert list(axis_ends(ruled_out, replace(plan, zero=2), ("vpp",))) == []
    wide = space_facts(space_of("pp == 4 and tp == 1", kind="wide"), PROBLEM)
    assert list(axis_ends(wide, plan, ())) == []


def test_ranks_lie_in_the_order_that_the_table_names() -> None:
    spread = Spread(tp=2, cp=3, pp=5, vpp=1, ep=1, dp=7, zero=0)
    assert [spread.stride(axis) for axis in RANK_ORDER] == [1, 2, 6, 42]
    assert spread.stride("pp") == spread.pipeline_rank
    assert ("tp", "cp", "dp", "pp") in {fact.values for fact in space_facts(space_of("pp == 1 and tp == 1"), PROBLEM)}


def test_the_command_lists_the_space_and_searches_nothing() -> None:
    asked = ("plan", "gpt2", "h100", "-D", "devices=8", "--batch", "32x1024", "--require", "pp >= 2", "--space-facts")
    told = CliRunner().invoke(main, [*asked, "--json"])
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["schema"] == "schedc.space"
    assert {"axis": "pp", "used": False, "values": [1], "why": "--require 'pp >= 2'"} in facts["facts"]
    text = CliRunner().invoke(main, list(asked)).stdout
    assert "pp                      has 2, 4, 8\n                        no 1: --require 'pp >= 2'\n" in text
    assert max(map(len, text.splitlines())) <= 120
    assert GPT2.model.name in text
    refused = CliRunner().invoke(main, [*asked, "-o", "plans"])
    assert refused.exit_code == 2
    assert "leave out -o" in refused.output
