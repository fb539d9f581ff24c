"""The plan line `slices` and the option `--slices`: read, resolved for stages, written, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import schedc
from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.text import print_schedule
from schedc.load.library import InSlices, Text
from schedc.plan import Plan, plan_of
from schedc.plan.writer import read_plan, write_plan
from schedc.source import NOWHERE, Source

_EXPERTS = "experts 64 top 8   topology nodes 2 x 4   tokens 64"


def _plan(lines: str, schedule: str = "interleaved_1f1b(P = 2, M = 4, v = 2)") -> Text:
    return Text(Source("<test>", f"plan a = {schedule} {{\n  layers 4\n  {lines}\n}}\n"))


@pytest.mark.parametrize(
    ("lines", "slices", "text"),
    [
        ("slices 2", (2, 2, 2, 2), "slices 2"),
        ("slices 1", (), ""),
        ("slices chunk 1 4", (1, 1, 4, 4), "slices stage [2, 3] 4"),
        ("slices 2  slices stage [0, 3] 1", (1, 2, 2, 1), "slices stage [1, 2] 2"),
        ("slices chunk 0 2  slices stage 1 3", (2, 3, 1, 1), "slices stage [0] 2  slices stage [1] 3"),
    ],
)
def test_lines_give_each_stage_its_slices(lines: str, slices: tuple[int, ...], text: str) -> None:
    plan = plan_of(legal_schedule(open_input(_plan(lines)), {}))
    assert plan.slices == slices
    assert write_plan(plan) == text
    assert read_plan(text, 4) == plan
    assert [plan.slices_of(stage) for stage in range(4)] == list(slices or (1, 1, 1, 1))
    assert plan.ordered is bool(slices)


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("slices 0", "S153", "a microbatch in 0 slices"),
        ("slices 65", "S153", "a microbatch in 65 slices"),
        ("slices chunk 2 2", "S153", "there is no chunk 2"),
        ("slices stage [0, 4] 2", "S153", "there is no stage 4"),
        ("slices lane 0 2", "S144", "`lane` is no part of a model"),
        ("slices 2  slices 4", "S153", "two numbers of slices for the same stages"),
        ("slices stage 1 2  slices stage [0, 1] 4", "S153", "two numbers of slices for the same stage"),
        (f"{_EXPERTS}  capacity 1.25  slices 2", "S153", "and a `capacity`"),
        (f"{_EXPERTS}  hot 2 by microbatch  slices 2", "S153", "and hot experts that are chosen by whole microbatches"),
        (f"{_EXPERTS}  balance by microbatch  slices 2", "S153", "and rows that are made even by whole microbatches"),
        ("overlap off  slices 2", "S144", "and `overlap off`"),
        ("cell F & B { compute F.attn }  slices 2", "S153", "and an order of a cell by hand"),
    ],
)
def test_what_cannot_be_is_refused_at_its_line(lines: str, code: str, message: str) -> None:
    schedule = "dualpipev(P = 2, M = 8)" if "cell" in lines else "interleaved_1f1b(P = 2, M = 4, v = 2)"
    with pytest.raises(DiagnosticError) as refused:
        legal_schedule(open_input(_plan(lines, schedule)), {})
    (finding,) = refused.value.diagnostics
    assert finding.code == code
    assert message in finding.message
    assert finding.help
    assert finding.primary.span != NOWHERE


def test_the_option_overrides_the_lines_of_a_plan_and_may_stand_beside_any_schedule(tmp_path: Path) -> None:
    (file := tmp_path / "a.sched").write_text(_plan("slices chunk 1 4").source.text)
    for name in ("1f1b", str(file), "zbh1"):
        program = schedc.compile(InSlices(name, 2), M=4)
        assert plan_of(program).slices == (2,) * program.stages
        assert not plan_of(schedc.compile(InSlices(name, 1), M=4)).slices
    text = tmp_path / "order.schedule"
    text.write_text(print_schedule(legal_schedule(open_input("1f1b"), {"P": 2, "M": 4})))
    assert plan_of(schedc.compile(InSlices(text, 2))).slices == (2, 2)


def test_a_program_in_slices_differs_in_its_plan_alone() -> None:
    whole, slices = (legal_schedule(open_input(name), {"P": 4, "M": 8}) for name in ("zbh1", InSlices("zbh1", 2)))
    assert slices.plan == Plan(slices=(2,) * 4)
    assert (slices.kind == whole.kind).all()
    assert (slices.microbatch == whole.microbatch).all()
    assert Plan() == plan_of(whole)


def test_a_policy_orders_by_the_times_of_slices() -> None:
    command = ["check", "zb_greedy", "-D", "P=2", "-D", "M=4", "--cost-file", "examples/costs/cells.toml", "--json"]
    facts = [json.loads(CliRunner().invoke(main, [*command, *more]).stdout) for more in ((), ("--slices", "2"))]
    assert facts[1]["cells"]["hidden_step"] > facts[0]["cells"]["hidden_step"]


def test_the_option_is_refused_where_the_plan_excludes_slices() -> None:
    result = CliRunner().invoke(main, ["check", "examples/04_plan/dsv3.sched", "--slices", "2"])
    assert result.exit_code == 1
    assert "an order of a cell by hand" in result.stderr
    refused = CliRunner().invoke(main, ["check", "1f1b", "--slices", "65"])
    assert "1 finding" in refused.stderr
