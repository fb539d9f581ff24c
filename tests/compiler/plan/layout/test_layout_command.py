"""`schedc layout` balances, prints and refuses as its page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from compiler.plan.layout.layer_costs import COSTS
from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.load.library import open_schedule
from schedc.plan.layout import (
    LayerCosts,
    Model,
    PerKind,
    balance,
    even,
    padded,
    parse_layer_costs,
)
from schedc.plan.layout.compare import measure
from schedc.source import Source
from support.paths import ROOT
from support.sweeps import swept


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["layout", *arguments])


INTERLEAVED = ("--schedule", "interleaved_1f1b", "-D", "P=8", "-D", "v=2", "-D", "M=54")


BALANCED = ("--layers", "61", "--dense", "3", "--mtp", "1", "--auto", *INTERLEAVED, "--layer-cost", "moe=1.4",
            "--layer-cost", "mtp=1.6", "--layer-cost", "head=0.9", "--layer-cost", "embedding=0.3")  # fmt: skip


def test_the_command_as_json() -> None:
    result = run("--layers", "61", "--pad", "3", *INTERLEAVED, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["schema"] == "schedc.layout"
    assert facts["layout"] == "Et*4|(t*4|)*14t,noop*3,L"
    assert (facts["largest_rank"], facts["optimal"], facts["paddings"]) == (8.0, False, 3)
    assert facts["stages"][15]["parts"] == ["dense 60", "3 noop", "head"]
    assert facts["stages"][8]["ranks"] == [0]
    assert facts["measured"]["makespan"] == 1368.0
    assert [(other["schedule"], other["makespan"]) for other in facts["others"]] == [
        ("interleaved_1f1b", 1349.0),
        ("1f1b", 1446.0),
    ]


@pytest.mark.slow
def test_the_command_balances_and_says_why_nothing_is_better() -> None:
    result = run(*BALANCED)
    assert result.exit_code == 0, result.output
    assert "largest rank 11.2, largest stage 9.8; none is better: no layout keeps every rank to 11.1" in result.output
    assert "mtp 0" in result.output
    shortest = run(*BALANCED, "--objective", "makespan", "--json")
    facts = json.loads(shortest.stdout)
    assert all(other["gain"] >= 0 for other in facts["others"] if other["what"].startswith("balanced"))
    assert facts["largest_rank"] > 11.2


def test_the_command_names_what_does_not_fit_into_memory() -> None:
    """Rank 0 holds 4 and per layer 1 + 2, rank 1 holds 2 and per layer 1 + 1: one layer and three need 7 and 8."""
    least = ("--layers", "4", "--auto", "--schedule", "1f1b", "-D", "P=2", "-D", "M=4",
             "--layer-cost", "parameters.dense=1", "--layer-cost", "parameters.embedding=4",
             "--layer-cost", "parameters.head=2")  # fmt: skip
    result = run(*least, "--limit", "7.5")
    assert result.exit_code == 1
    assert "error[S406]: no layout keeps every rank within 7.5: rank 1 holds 8 in the smallest layout" in result.output
    assert "note: rank 1 holds 3 for the parameters of 3 dense layers of stage 1\n" in result.output
    assert "note: rank 1 holds 3 for the activations of 1 microbatch in 3 dense layers of stage 1\n" in result.output
    assert "note: rank 1 holds 2 for the parameters of 1 head of stage 1\n" in result.output
    enough = run(*least, "--limit", "8")
    assert enough.exit_code == 0, enough.output
    assert "layout Et|tttL" in enough.output


def test_the_command_shows_where_a_string_is_wrong() -> None:
    result = run("Et*3|tx|L")
    assert result.exit_code == 2
    assert "--> layout:1:7" in result.output
    assert run("Et*3|tt|L").exit_code == 0
    fits_not = run("Et*3|tt|L", *INTERLEAVED)
    assert fits_not.exit_code == 2
    assert "the layout has 3 stages, interleaved_1f1b has 16 at these sizes" in fits_not.output
    counted = run("Et*3|tt|L", "--stages", "4")
    assert counted.exit_code == 2
    assert "the layout has 3 stages, --stages says 4" in counted.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a LAYOUT, or --layers"),
        (("Et|L", "--pad", "1"), "a LAYOUT says itself"),
        (("Et|L", "--mtp", "1"), "a LAYOUT says itself"),
        (("Etm|L", "--losses", "each"), "a LAYOUT says itself"),
        (("--layers", "8", "--stages", "2", "--losses", "each"), "need --mtp"),
        (("--layers", "8", "--stages", "2", "--mtp", "1", "--embed", "auto"), "need --schedule"),
        (("--layers", "8", "--stages", "2", "--at", "first"), "--at needs --pad"),
        (("--layers", "8", "--stages", "2", "--pad", "0", "--auto", "--at", "first"), "--auto leaves no choice"),
        (("--layers", "8"), "--layers needs --schedule or --stages"),
        (("--layers", "8", "--stages", "2", "--schedule", "1f1b"), "--stages follows from --schedule"),
        (("Et|L", "-D", "P=2"), "-D needs --schedule"),
        (("--layers", "8", "--stages", "2", "--limit", "4"), "--limit needs"),
        (("--layers", "8", "--schedule", "1f1b", "--auto", "--limit", "nan"), "is no number of 0 or more"),
        (("--layers", "8", "--stages", "2", "--auto", "--objective", "makespan"), "--objective makespan needs"),
        (("--layers", "8", "--stages", "2", "--at", "here"), "is not last, first, auto or numbers"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_wrong_costs_are_wrong_usage(tmp_path: Path) -> None:
    assert run("Et|L", "--layer-cost", "mow=1").exit_code == 2
    path = tmp_path / "costs.toml"
    path.write_text(COSTS.replace("moe", "mow"), encoding="utf-8")
    assert run("Et|L", "--layer-cost-file", str(path)).exit_code == 1
    path.write_text(COSTS, encoding="utf-8")
    result = run("Et|L", "--dense", "0", "--layer-cost-file", str(path), "--json")
    assert json.loads(result.stdout)["load"] == [1.4, 0.9]


LAYERS_MD = (ROOT / "docs" / "reference" / "layers.md").read_text(encoding="utf-8")


def test_the_costs_and_the_table_of_the_page() -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", LAYERS_MD, re.DOTALL)
    assert parse_layer_costs(Source("layers.md", toml)).time == PerKind(0.3, 1.0, 1.4, 1.6, 0.9)
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", LAYERS_MD, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        microbatches = int(row[0])
        interleaved = legal_schedule(open_schedule("interleaved_1f1b"), {"P": 8, "M": microbatches, "v": 2})
        one_chunk = legal_schedule(open_schedule("1f1b"), {"P": 8, "M": microbatches})
        uneven = measure(even(Model(61), 8), one_chunk, LayerCosts())
        gains = [(8 * microbatches + 56) / (8 * microbatches + 28) - 1]
        for layout in (padded(Model(61), 16, 3), balance(Model(61), interleaved.placement, pad=3).layout):
            gains.append(uneven.makespan / measure(layout, interleaved, LayerCosts()).makespan - 1)
        assert [f"{gain:.1%}" for gain in gains] == [f"{number}%" for number in row[1:]]


HEADS = ("--layers", "61", "--dense", "3", "--mtp", "1", "--auto", "--objective", "makespan",
         "--schedule", "interleaved_1f1b", "-D", "P=16", "-D", "v=4", "-D", "M=64",
         "--layer-cost", "moe=1.4", "--layer-cost", "mtp=1.6", "--layer-cost", "embedding=0.3")  # fmt: skip


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("head", "one", "each"), [("2.7", 1374.9, 1167.2), *swept([("0.9", 1153.5, 1165.5)], [])])
def test_a_head_per_output_makes_a_shorter_step_where_a_stage_is_smaller_than_the_heads(
    head: str, one: float, each: float
) -> None:
    facts = json.loads(run(*HEADS, "--layer-cost", f"head={head}", "--losses", "auto", "--json").stdout)
    other = next(other for other in facts["others"] if " heads, " in other["what"] or "1 head, " in other["what"])
    steps = {facts["losses"]: facts["measured"]["makespan"], 3 - facts["losses"]: other["makespan"]}
    assert steps == {1: pytest.approx(one), 2: pytest.approx(each)}
    assert facts["measured"]["makespan"] == min(steps.values())


def test_the_embedding_of_predictions_is_placed_by_memory_first() -> None:
    """The table of 9 is the prediction's own, or the first stage's alone: the fullest rank holds 14 or 10."""
    told = ("--layers", "4", "--mtp", "1", "--auto", "--schedule", "1f1b", "-D", "P=3", "-D", "M=4", "--embed", "auto",
            "--layer-cost", "parameters.embedding=9", "--layer-cost", "parameters.mtp=12", "--layer-cost", "p2p=0.1",
            "--layer-cost", "activations.dense=0", "--layer-cost", "activations.mtp=0")  # fmt: skip
    result = run(*told)
    assert "chosen: 1 head, predictions embedded in the first stage; the fullest rank holds 9\n" in result.output
    other = "1 head, predictions embedded in their own stage"
    line = next(line for line in result.output.splitlines() if other in line)
    assert "shorter; the fullest rank holds 12" in line
    assert "states of tokens x columns that cross: 2 behind stage 0 to 1" in result.output
    facts = json.loads(run(*told, "--json").stdout)
    assert (facts["embeds_first"], facts["crossing"], facts["layout"]) == (True, [2, 2], "Ee" + facts["layout"][2:])
