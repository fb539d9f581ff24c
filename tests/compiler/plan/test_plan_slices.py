"""The plan line `slices` and the option `--slices`: read, resolved for stages, written, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import schedc
from schedc.cli import main
from schedc.compiler import analyse, legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.text import print_program, print_schedule
from schedc.load.library import InSlices, Text
from schedc.plan import Plan, plan_of
from schedc.plan.writer import read_plan, write_plan
from schedc.report.check import to_json
from schedc.report.choices import slices_auto_text
from schedc.source import NOWHERE, Source
from schedc.step.costs.costs import Costs, load_costs

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
        ("slices 2 of tokens", (2, 2, 2, 2), "slices 2 of tokens"),
        ("slices chunk 1 4 of tokens", (1, 1, 4, 4), "slices stage [2, 3] 4 of tokens"),
        ("slices 1 of tokens", (), ""),
    ],
)
def test_lines_give_each_stage_its_slices(lines: str, slices: tuple[int, ...], text: str) -> None:
    plan = plan_of(legal_schedule(open_input(_plan(lines)), {}))
    assert plan.slices == slices
    assert write_plan(plan) == text
    assert read_plan(text, 4) == plan
    assert (plan.token_slices if "tokens" in text else plan.row_slices) == slices
    assert not (plan.row_slices if "tokens" in text else plan.token_slices)
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
        ("slices many", "S144", "`many` is no number of slices"),
        ("slices auto  slices stage 0 2", "S153", "`slices auto`, and numbers of stages"),
        ("slices chunk 0 auto", "S153", "`slices auto`, and numbers of stages"),
        ("overlap off  slices auto", "S144", "and `overlap off`"),
        ("slices 2 of rows", "S153", "slices `of rows`"),
        ("slices chunk 0 2 of tokens  slices chunk 1 2", "S153", "slices of rows beside slices of tokens"),
        ("parallel tp 1 cp 1 dp 1  slices 2 of tokens", "S153", "and tp 1: no exchange of tensor ranks"),
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


_COSTS = """schema = "schedc.costs/1"

[cell]
stages = "dense"
before_gather = {{F = 2, I = 2}}
after_gather = {{F = 20, I = 20, W = 20}}
gather = {{node = {exchange}}}
scatter = {{node = {exchange}}}
slices = {factors}
"""


def _costs(folder: Path, exchange: float, factors: str) -> Costs:
    (folder / "costs.toml").write_text(_COSTS.format(exchange=exchange, factors=factors))
    return load_costs(folder / "costs.toml")


@pytest.mark.parametrize(
    ("schedule", "exchange", "factors", "kind", "slices"),
    [
        ("1f1b(P = 2, M = 4)", 5.5, "{2 = 1.05, 4 = 1.1}", "", (4, 4)),
        ("1f1b(P = 2, M = 4)", 5.5, "{2 = 1.25}", "", ()),
        ("1f1b(P = 2, M = 4)", 5.5, "{2 = 1.5}", " of tokens", ()),
        ("1f1b(P = 2, M = 4)", 5.5, "{2 = 1.05, 4 = 1.1}", " of tokens", (4, 4)),
        ("dualpipev(P = 2, M = 6)", 5.5, "{2 = 1.15}", "", (2, 2, 1, 1)),
    ],
)
def test_the_slices_of_the_shortest_step_are_chosen(
    tmp_path: Path, schedule: str, exchange: float, factors: str, kind: str, slices: tuple[int, ...]
) -> None:
    """Each candidate has the price of its own lines, and the program is that of the lines of the best one."""
    costs = _costs(tmp_path, exchange, factors)
    step = analyse(_plan(f"slices auto{kind}", schedule), {}, costs)
    assert step.sliced is not None
    assert step.schedule.plan.slices == step.sliced.chosen.plan.slices == slices
    for each in step.sliced.candidates:
        lines = "  ".join(f"slices stage {stage} {count}{kind}" for stage, count in enumerate(each.plan.slices))
        alone = analyse(_plan(lines, schedule), {}, costs)
        assert alone.inside is not None
        assert (alone.plan, alone.inside.late_wait.makespan) == (each.plan, each.makespan)
        assert step.sliced.chosen.makespan <= each.makespan
        if each is step.sliced.chosen:
            assert print_program(alone.program()) == print_program(step.program())
            assert alone.inside.hidden_steady == each.pairs


def test_slices_of_tokens_need_exchanges_of_tensor_ranks() -> None:
    costs = load_costs(Path("examples/costs/cells.toml"))
    with pytest.raises(DiagnosticError, match="no exchanges of tensor ranks: they would change nothing"):
        analyse(_plan("slices 2 of tokens", "1f1b(P = 2, M = 4)"), {}, costs)


def test_slices_that_are_chosen_say_why(tmp_path: Path) -> None:
    def told(lines: str, factors: str) -> list[str]:
        step = analyse(_plan(lines, "1f1b_overlap(P = 2, M = 4)"), {}, _costs(tmp_path, 5.5, factors))
        return list(slices_auto_text(to_json(step)["slices_auto"]))

    assert told("slices auto", "{2 = 1.05}") == [
        "slices auto: slices 2, a step of 1349.25: 5.1 % shorter than whole microbatches",
        "  whole: step 1422.5; exchanges hidden 0.250 in lone cells and 0.960 in pairs",
        "  slices 2: step 1349.25; exchanges hidden 0.802 in lone cells and 0.993 in pairs",
    ]
    nothing = "slices auto: whole microbatches; nothing was compared: give a table [cell] with factors of `slices`"
    assert told("slices auto", "{}") == [nothing]
    refused = told(f"{_EXPERTS}  capacity 1.25  slices auto", "{2 = 1.05}")
    assert refused[0].startswith("slices auto: whole, a step of ")
    assert refused[-1].startswith("  slices 2: not compared: `slices`, and a `capacity`")
    assert not plan_of(schedc.compile(_plan("slices auto"))).slices
