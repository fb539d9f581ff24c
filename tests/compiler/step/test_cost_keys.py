"""The table of cost keys, and what must follow from its rows."""

from __future__ import annotations

from dataclasses import fields

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.cli.cost_words import help_text
from schedc.diagnostics import DiagnosticError
from schedc.source import Source
from schedc.step.costs.costs import Costs, StageCosts, parse_costs
from schedc.step.costs.keys import KEYS, CostKey
from support.paths import ROOT


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_row_is_a_row_of_the_guide(key: CostKey) -> None:
    guide = ROOT.joinpath("docs", "guide", "costs.md").read_text(encoding="utf-8")
    default = " + ".join(key.sums) or f"{key.default:g}"
    assert f"| `{key.name}` | {key.meaning} | `{default}` |" in guide.splitlines()


def test_the_guide_has_no_other_keys() -> None:
    guide = ROOT.joinpath("docs", "guide", "costs.md").read_text(encoding="utf-8")
    table = guide.split("| name | meaning | default |")[1].split("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines()[2:]] == [key.name for key in KEYS]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_is_read_and_has_its_default(key: CostKey) -> None:
    assert {key.name} <= {field.name for field in fields(StageCosts)}
    assert getattr(Costs(), key.name) == (None if key.sums else key.default)
    text = f'schema = "schedc.costs/1"\n[{key.table}]\n{key.name} = 3\n'
    from_file, from_option = parse_costs(Source("c.toml", text)), Costs.from_options([f"{key.name}=3"])
    assert getattr(from_file, key.name) == getattr(from_option, key.name) == 3


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_list_is_refused_where_a_key_has_one_value(key: CostKey) -> None:
    if key.per_stage:
        assert getattr(Costs.from_options([f"{key.name}=1,2"]), key.name) == (1.0, 2.0)
        return
    with pytest.raises(DiagnosticError, match="S402"):
        Costs.from_options([f"{key.name}=1,2"])


def test_defaults_that_are_sums() -> None:
    costs = Costs(F=2.0, I=(3.0, 4.0), W=5.0).resolved(2)
    for key in KEYS:
        if key.sums and getattr(costs, key.name) is not None:
            expected = sum(getattr(costs, name) for name in key.sums)
            assert (getattr(costs, key.name) == expected).all(), key.name


def test_the_help_lists_every_key_with_its_default() -> None:
    shown = " ".join(CliRunner().invoke(main, ["check", "--help"], terminal_width=1000).output.split())
    assert help_text() in shown
    for key in KEYS:
        assert f"{key.name}=" in help_text()
