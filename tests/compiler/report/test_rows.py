"""Factors of microbatches in files and options, and what `schedc check --rows` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from compiler.step.unequal_cases import known, rows
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.load.library import Text
from schedc.plan.passes import lower
from schedc.plan.price_rows import price_rows
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.costs.row_costs import microbatch_costs, read_row_costs
from schedc.step.timeline import simulate

SCHEDULES = Path(__file__).parents[3] / "schedules"

OFFLOADS = """plan p = 1f1b(P = 4, M = 8) {
  layers 4
  host 100 at 0.2
  offload all
}
"""


def test_reads_and_writes_factors() -> None:
    for factors in ((0.5, 2.0), ((1.0, 2.0), (3.0, 4.0))):
        text = dump_costs(Costs(F=2.0, microbatches=factors))
        assert parse_costs(Source("c.toml", text)).microbatches == factors
    base = parse_costs(Source("c.toml", 'schema = "schedc.costs/1"\nmicrobatches = [1, 3]\n[ops]\nF = 2\nB = 3\n'))
    assert base.given == {"F", "B"}
    assert Costs.from_options(["microbatches=2,0.5"], base).microbatches == (2.0, 0.5)
    for text in ("[1, -1]", "[nan]", "[inf]", "[]", "3", "[true]", '["a"]', "[[1], [1, 2]]", "{a = 1}"):
        with pytest.raises(DiagnosticError) as error:
            parse_costs(Source("c.toml", f'schema = "schedc.costs/1"\nmicrobatches = {text}\n')).resolved(2)
        assert [each.code for each in error.value.diagnostics] == ["S412"]


def test_check_prices_given_rows(tmp_path: Path) -> None:
    run, path = CliRunner(), tmp_path / "rows.txt"
    given = rows(16, seed=10)
    path.write_text("# rows\n" + "\n".join(map(str, given)) + "\n")
    command = ["check", "dualpipev", "-D", "P=4", "-D", "M=16", "--cost", "p2p=0.1", "--rows", str(path)]
    facts = json.loads(run.invoke(main, [*command, "--json"]).stdout)
    told, schedule = facts["rows"], known("dualpipev").schedule
    for name, order in (("given", range(16)), ("ordered", told["order"])):
        factors = tuple(given[m] * 16 / sum(given) for m in order)
        assert told[name] == pytest.approx(simulate(schedule, Costs(p2p=0.1, microbatches=factors)).makespan)
    assert told["bound"] <= told["ordered"] < told["given"]
    assert told["equal"] == facts["makespan"]
    assert f"ordered {told['ordered']:g}" in run.invoke(main, command).stdout


def test_rows_of_a_microbatch_add_up() -> None:
    source = Source("rows.txt", "# costs\n1 2\n\n3, 4  # a comment\n5 6\n7 8\n")
    costs = microbatch_costs(read_row_costs(source), source, 2, 2)
    assert (costs * 9 == np.array([[4, 12], [6, 14]])).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\n2\n3\n", "3 rows, and the step has 4 microbatches"),
        ("1\n-2\n3\n4\n", "a cost is a number from 0"),
        ("1\n2\nx\n4\n", "no cost of a row"),
        ("1\n2 3\n3\n4\n", "2 costs, and 1 in the lines before"),
        ("1 1 1\n" * 4, "3 costs in a line, the schedule has 2 stages"),
        ("0\n" * 4, "no cost above 0"),
        ("nan\n" * 4, "a cost is a number from 0"),
    ],
)
def test_refuses_rows(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.txt"
    path.write_text(text)
    result = CliRunner().invoke(main, ["check", "1f1b", "-D", "P=2", "-D", "M=4", "--rows", str(path), "--json"])
    (finding,) = json.loads(result.stdout)["diagnostics"]
    assert (finding["code"], result.exit_code) == ("S412", 1)
    assert said in finding["message"]


def test_prices_rows_by_the_segments_and_with_works() -> None:
    """A microbatch in segments moves whole, and a plan keeps its works where factors change."""
    source = Source("rows.txt", "\n".join(map(str, rows(16, seed=11))))
    costs = read_row_costs(source)
    step = lower(analyse("seq1f1b", {"P": 4, "M": 16, "k": 4}, Costs()), "timeline")
    prices = price_rows(step, source, costs, 480)
    factors = np.repeat(prices.costs[0, prices.order], 4)
    assert prices.ordered == simulate(step.schedule, Costs(microbatches=tuple(factors.tolist()))).makespan
    assert prices.ordered < prices.given
    offloads = Text(Source("offloads.sched", OFFLOADS))
    step = lower(analyse(offloads, {}, Costs()), "timeline", "predicted")
    assert step.works is not None
    prices = price_rows(step, source, costs[:8] ** 0 + 0.0, 48)
    assert prices.given == prices.ordered == prices.equal == step.timeline.makespan
    with_works = price_rows(step, source, costs[:8], 48)
    factors = tuple((costs[:8, 0] / costs[:8].mean()).tolist())
    assert with_works.given > simulate(step.schedule, replace(step.costs, microbatches=factors)).makespan


def test_a_verdict_names_costs_outside_of_its_domain() -> None:
    result = CliRunner().invoke(main, ["check", "1f1b", "-D", "P=2", "-D", "M=4", "--cost", "microbatches=1,2,1,1"])
    assert result.exit_code == 0
    assert "makespan 20," in result.stdout
    assert "proved for all costs at this size (not the given ones: it speaks of microbatches of equal" in result.stdout


SEGMENTED = ("seq1f1b", "-D", "P=2", "-D", "M=4", "-D", "k=2")
FACTORS = ("--cost", "microbatches=1,2,1,3,1,2,1,3")
"""Those of the two segments of four microbatches."""
POLICY = """sched 1

schedule chosen(P: ranks = 2, M: microbatches = 4, k: segments = 2) {
  place linear
  rank r {
    policy prefer B > F  cap F - B <= P+k { repeat M*k { F }  repeat M*k { B } }
  }
}
"""


def span_of_trace(text: str) -> float:
    return max(event["ts"] + event["dur"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X") / 1000


def drawn(text: str) -> float:
    return float(text.partition("makespan ")[2].split(maxsplit=1)[0].rstrip(","))


Telling = tuple[tuple[str, ...], Callable[[str], float] | None]
TELLING: dict[str, Telling] = {
    "check": ((*SEGMENTED, "--json"), lambda text: json.loads(text)["makespan"]),
    "compile": ((*SEGMENTED, "--json"), lambda text: json.loads(text)["makespan"]),
    "diff": ((SEGMENTED[0], *SEGMENTED, "--json"), lambda text: json.loads(text)["figures"]["makespan"][1]),
    "export": ((*SEGMENTED, "--to", "trace"), span_of_trace),
    "freeze": (("policy.sched", *SEGMENTED[1:]), None),
    "lock": (SEGMENTED, None),
    "run": ((*SEGMENTED, "--in-process"), None),
    "show": (SEGMENTED, drawn),
    "tune": ((*SEGMENTED, "--effort", "0.1", "--json"), lambda text: json.loads(text)["seed"]["makespan"]),
    "watch": (("seq1f1b.sched", *SEGMENTED[1:]), drawn),
}
"""By command that goes by costs of ops: arguments, and the step in what it prints; None where it prints no step."""
REFUSING = {
    "report": SEGMENTED,
    "layout": ("--layers", "4", "--stages", "2"),
    "diagnose": ("seq1f1b.sched",),
    "frontier": ("-D", "P=2", "-D", "M=2"),
    "compare": ("1f1b", "-D", "P=2", "-D", "M=2"),
}
"""The commands with costs that speak of microbatches of equal cost alone."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules in the folder of the test; `schedc watch` looks once."""
    (tmp_path / "policy.sched").write_text(POLICY)
    (tmp_path / "seq1f1b.sched").write_text((SCHEDULES / "seq1f1b.sched").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedc.cli.watch._changes", lambda path: iter([None]))


def test_each_command_with_costs_is_in_a_table() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    named = {name for name, each in commands.items() if each and any("--cost" in of.opts for of in each.params)}
    assert named == TELLING.keys() | REFUSING.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", TELLING)
def test_commands_go_by_factors_of_segments(name: str) -> None:
    arguments, step = TELLING[name]
    command = [name, *arguments]
    if step is not None:
        schedule = known("seq1f1b", P=2, M=4, k=2).schedule
        factors = tuple(map(float, FACTORS[1].partition("=")[2].split(",")))
        printed = CliRunner().invoke(main, [*command, *FACTORS])
        assert printed.exit_code == 0, printed.output
        assert step(printed.stdout) == simulate(schedule, Costs(microbatches=factors)).makespan == 63
    elif name == "freeze":
        orders = []
        for costs in ((), FACTORS):
            assert CliRunner().invoke(main, [*command, *costs]).exit_code == 0
            orders.append(Path("chosen.P2-M4-k2.order").read_text())
        assert orders[0] != orders[1]
    result = CliRunner().invoke(main, [*command, "--cost", "microbatches=1,2,1,3"])
    assert "factors of 4 microbatches" in result.output
    assert result.exit_code == (0 if name == "watch" else 1)  # which goes on until the file is right


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", REFUSING)
def test_other_commands_refuse_them(name: str) -> None:
    result = CliRunner().invoke(main, [name, *REFUSING[name], *FACTORS])
    assert "`microbatches`" in result.output
    assert result.exit_code in (1, 2)


def test_ranges_of_sizes_refuse_them() -> None:
    result = CliRunner().invoke(main, ["check", "1f1b", "--sweep", "P<=2, M<=2", "--cost", "microbatches=1,2"])
    assert (result.exit_code, "microbatches" in result.stderr) == (2, True)
