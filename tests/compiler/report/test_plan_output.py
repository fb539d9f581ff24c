"""A folder of priced plans: `schedc check` of the files agrees with the JSON, and the page draws the plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.planner.fit.fitted import Fit
from schedc.report.plan_files import load_plan_facts
from schedc.report.priced_plans import plan_facts
from schedc.report.problem import fit_facts, problem_facts
from schedc.report.search_facts import extrapolated
from support.html_page import PageReader
from support.written_plans import GPT2, small_plans, written_plans

FIT = Fit("some", ("H100 SXM 80 GB",), ("bf16",), 40, "ab12", {}, 6.0, 88.0, 12.5, seen={"tp": (1, 1), "dp": (1, 64)})


def test_the_facts_of_a_plan_add_up() -> None:
    for place, plan in enumerate(small_plans(), 1):
        facts = plan_facts(plan, place, ["zero"], 0.5 * plan.step)
        assert sum(bar["seconds"] for bar in facts["waterfall"]) == pytest.approx(facts["step_s"], rel=1e-9)
        assert sum(facts["memory"]["parts"].values()) == pytest.approx(facts["memory"]["needed_bytes"], rel=1e-9)
        assert min(facts["memory"]["parts"].values()) > 0
        assert facts["step_low_s"] * facts["step_high_s"] == pytest.approx(facts["step_s"] ** 2)
        assert facts["interval"]["rows_pct"] + sum(facts["interval"]["wide"].values()) <= 100.1
        assert facts["interval"]["undecided"] == list(facts["interval"]["wide"])  # without a fit
        assert facts["tokens_per_s_per_device"] == pytest.approx(16 * 1024 / 8 / facts["step_s"])
        assert facts["mfu"] == pytest.approx(facts["waterfall"][0]["seconds"] / facts["step_s"])
        assert (facts["file"], facts["free"]) == (f"{place:02}.sched", ["zero"])


def test_what_a_fit_has_not_seen_is_named() -> None:
    entries = [plan_facts(plan, 1, (), 0.0) for plan in small_plans()]
    assert extrapolated(FIT, entries) == ["tp 2 (rows: 1)"]
    assert extrapolated(None, entries) == []
    assert fit_facts(None)["name"] == ""
    facts = problem_facts(GPT2, FIT)
    assert facts["fit"] == {
        "name": "some", "rows": 40, "cv_mape_pct": 6.0, "held_pct": 88.0, "width_pct": 12.5, "hash": "ab12",
        "forced": False, "unseen": [],
    }  # fmt: skip
    assert facts["model"]["parameters"] == 124_439_808
    assert facts["cluster"]["devices"] == 8


def test_a_written_folder_says_what_check_says(tmp_path: Path) -> None:
    folder = written_plans(tmp_path / "plans")
    names = ["01.costs.toml", "01.sched", "02.costs.toml", "02.sched", "index.html", "pareto.svg", "plans.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for entry in json.loads((folder / "plans.json").read_text())["plans"]:
        path = folder / entry["file"]
        costs = str(path.with_suffix(".costs.toml"))
        result = CliRunner().invoke(main, ["check", str(path), "--cost-file", costs, "--json"])
        assert result.exit_code == 0, result.output
        checked = json.loads(result.stdout)
        assert checked["makespan"] == pytest.approx(entry["makespan_s"], rel=1e-9)
        assert max(checked["peak_memory"]) == pytest.approx(entry["memory"]["peak_bytes"], rel=1e-9)
        assert load_plan_facts(path)[1] == entry
    pictures = PageReader((folder / "index.html").read_text()).page_data["pictures"]
    assert sorted(pictures) == ["01.sched", "02.sched"]
