"""`schedc plan MODEL CLUSTER --batch`: output, the written folder, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.planner.presets.library import files
from schedc.planner.times.skew import fullest_rank
from schedc.units import shown
from support.sweeps import in_sweeps, swept

SEARCH = (
    *("gpt2", "h100", "-D", "devices=8", "--batch", "32x1024", "--require", "pp >= 2 and schedule in 1f1b, zbh1"),
    *("--draws", "off"),
)

KEYS = {
    "": "schema version model cluster batch precision skew spread spread_assumed recorded fit origins "
    "constants objective training slow space counts seconds certificate plans also chances decided_by measure_next "
    "axis_ends pareto extrapolates left_out",
    "batch": "sequences seq",
    "fit": "name rows cv_mape_pct held_pct width_pct hash forced unseen",
    "space": "raw legal fit restrictions facts",
    "counts": "bounded simulated orders priced",
    "seconds": "cpu wall by_stage",
    "certificate": "complete bound_s kth_s ended_early policies sentence",
}
PLAN_KEYS = (
    "file axes free step_s step_low_s step_high_s interval makespan_s devices spare tokens_per_s_per_device mfu "
    "memory waterfall floor_s runs_on budget slow first_in within_5_pct loss_pct"
)


def shipped(fit: str) -> str:
    return str(files("fits")[fit])


def shipped_text(cluster: str) -> str:
    return files("clusters")[cluster].read_text()


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("search") / "plans"
    result = schedc("plan", *SEARCH, "--top", "3", "-o", str(folder), "--json")
    assert (result.exit_code, result.stderr) == (0, f"wrote {folder}\n")
    return json.loads(result.stdout), folder


def test_the_facts_of_a_search(found: tuple[dict[str, Any], Path]) -> None:
    facts, folder = found
    for part, keys in KEYS.items():
        assert list(facts[part] if part else facts) == keys.split()
    assert (facts["schema"], facts["version"]) == ("schedc.plans", 1)
    assert json.loads((folder / "plans.json").read_text()) == facts
    assert facts["certificate"]["complete"] is True
    assert facts["counts"]["bounded"] == facts["space"]["legal"] > facts["counts"]["simulated"] > 0
    steps = [plan["step_s"] for plan in facts["plans"]]
    assert steps == sorted(steps)
    assert facts["certificate"]["bound_s"] == steps[0]
    assert facts["certificate"]["kth_s"] == steps[-1]
    for plan in facts["plans"]:
        assert list(plan) == PLAN_KEYS.split()
        assert sum(bar["seconds"] for bar in plan["waterfall"]) == pytest.approx(plan["step_s"], rel=1e-9)
        assert plan["floor_s"] <= plan["step_s"] * (1 + 1e-12)
        assert plan["axes"]["pp"] >= 2
    fronts = [(point["step_s"], point["bytes"]) for point in facts["pareto"]]
    assert not [(a, b) for a in fronts for b in fronts if a != b and a[0] <= b[0] and a[1] <= b[1]]


def test_the_files_of_a_search_compile(found: tuple[dict[str, Any], Path]) -> None:
    facts, folder = found
    for plan in facts["plans"]:
        path = folder / plan["file"]
        assert schedc("fmt", "--check", str(path)).exit_code == 0
        result = schedc("check", str(path), "--cost-file", str(path.with_suffix(".costs.toml")), "--json")
        assert result.exit_code == 0, result.output
        checked = json.loads(result.stdout)
        assert checked["makespan"] == pytest.approx(plan["makespan_s"], rel=1e-9)
        assert max(checked["peak_memory"]) == pytest.approx(plan["memory"]["peak_bytes"], rel=1e-9)
    assert {"index.html", "pareto.svg"} <= {path.name for path in folder.iterdir()}


def test_a_folder_of_plans_is_refused_before_the_search(found: tuple[dict[str, Any], Path]) -> None:
    _, folder = found
    result = schedc("plan", *SEARCH, "-o", str(folder))
    assert (result.exit_code, "error[S750]" in result.stderr, result.stdout) == (1, True, "")
    again = schedc("plan", *SEARCH, "--top", "1", "-o", str(folder), "--force")
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-1].startswith("at the medians no plan of this space is faster than ")
    assert sorted(path.name for path in folder.glob("*.sched")) == ["01.sched"]


@pytest.mark.slow
def test_where_a_plan_stands() -> None:
    result = schedc("plan", *SEARCH, "--top", "2", "--explain", "pp=4,schedule=zbh1", "--json")
    explain, sliders = (json.loads(result.stdout)[name] for name in ("explain", "sliders"))
    assert sliders["plans"] == ["01.sched", "02.sched", "asked"]
    for setting in sliders["settings"]:
        now = setting["steps_s"][setting["values"].index(setting["value"])]
        assert now[2] == explain["step_s"]
    assert (explain["legal"], explain["fits"], explain["asked"]) == (True, True, "pp == 4, schedule == zbh1")
    assert (explain["axes"]["pp"], explain["axes"]["schedule"]) == (4, "zbh1")
    assert explain["gap_pct"] >= 0
    best = json.loads(result.stdout)["plans"][0]["step_s"]
    assert sum(bar["seconds"] for bar in explain["why"]) == pytest.approx(explain["step_s"] - best, abs=1e-9)
    text = schedc("plan", *SEARCH, "--explain", "tp=7").stdout
    assert "the plan with tp == 7\nis not in the space: " in text


def test_other_objectives() -> None:
    result = schedc("plan", *SEARCH, "--objective", "memory", "--top", "2", "--json")
    facts = json.loads(result.stdout)
    needed = [plan["memory"]["needed_bytes"] for plan in facts["plans"]]
    assert needed == sorted(needed)
    assert needed[0] == min(point["bytes"] for point in facts["pareto"])
    fastest = json.loads(schedc("plan", *SEARCH, "--top", "1", "--json").stdout)["plans"][0]["step_s"]
    assert 0 < facts["certificate"]["bound_s"] <= fastest < facts["plans"][0]["step_s"]
    text = schedc("plan", *SEARCH, "--objective", "memory", "--top", "1").stdout
    assert text.splitlines()[-1] == f"no plan of this space needs less than {needed[0] / 1e9:.2f} GB"


def test_the_budget_of_a_training_run() -> None:
    """By hand from the step; 2T and 2e12 are alike."""
    asked = ("--top", "2", "--tokens", "2T", "--price", "2.5", "--watts", "1000")
    facts = json.loads(schedc("plan", *SEARCH, *asked, "--json").stdout)
    batch, devices = facts["batch"], facts["cluster"]["devices"]
    for plan in facts["plans"]:
        budget = plan["budget"]
        steps = -(-2 * 10**12 // (batch["sequences"] * batch["seq"]))
        hours = steps * plan["step_s"] / 3600 * devices
        assert (budget["steps"], budget["goodput"], budget["checkpoint_every"]) == (steps, 1.0, None)
        assert budget["days"] == pytest.approx(hours / devices / 24)
        assert (budget["cost"], budget["MWh"]) == pytest.approx((2.5 * hours, hours / 1000))
        assert budget["cost_per_million"] == pytest.approx(budget["cost"] / 2e6, rel=1e-6)
    failing = ("--mtbf", "1000", "--checkpoint", "10", "--restart", "300")
    lost = json.loads(schedc("plan", *SEARCH, "--top", "2", "--tokens", "2e12", *failing, "--json").stdout)["plans"][0]
    first = facts["plans"][0]["budget"]
    assert lost["budget"]["days"] == pytest.approx(first["days"] / lost["budget"]["goodput"])
    assert 0.9 < lost["budget"]["goodput"] < 1
    assert lost["budget"]["cost"] is None
    text = schedc("plan", *SEARCH, *asked, *failing).stdout
    assert all(title in text for title in ("days", "device-h", "per Mtok", "MWh", "a run of 2T tokens"))
    every = f"{lost['budget']['checkpoint_every']:,} steps"
    assert f"leave {100 * lost['budget']['goodput']:.1f} % of the time" in text.replace("\n  ", " ")
    assert every in text.replace("\n  ", " ")


def test_slow_devices_reach_the_facts() -> None:
    facts = json.loads(schedc("plan", *SEARCH, "--top", "2", "--slow", "1.2x1", "--json").stdout)
    assert facts["slow"] == {"factor": 1.2, "devices": 1}
    for plan in facts["plans"]:
        assert plan["step_s"] < plan["slow"]["step_s"] < 1.2 * plan["step_s"]
        assert (plan["slow"]["all_tried"], plan["slow"]["without"]) == (True, None)
    text = schedc("plan", *SEARCH, "--top", "2", "--slow", "1.2x1").stdout
    assert "where one device takes 1.2 times as long, the first plan takes " in text


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        (("--require", "pp >= 200"), 1, "error[S712]"),
        (("--require", "pp > > 2"), 2, "error[S711]"),
        (("--restrict", "megatorn"), 2, "error[S713]"),
        (("--explain", "qq=3"), 2, "error[S711]"),
        (("--explain", "--vary", "gem"), 1, "did you mean `gemm`?"),
        (("--fit", "pyproject.toml"), 1, "error[S725]"),
        (("--precision", "fp4"), 1, "error[S708]"),
        (("--precision", "int8"), 2, "'int8' is not one of"),
        (("--skew", "1.4"), 1, "error[S715]"),
        (("--skew", "0.9"), 2, "0.9 is no skew"),
        (("--skew", "nan"), 2, "nan is no skew"),
        (("--skew", "cv=10"), 2, "cv=10 is no spread"),
        (("--skew", "cv=0"), 2, "cv=0 is no spread"),
        (("--skew", "1.4@1"), 2, "a group of 2 ranks or more"),
        (("--skew", "cv=0.3@8"), 2, "is no skew"),
        (("--skew", "1.2.3"), 2, "is no skew"),
        (("--skew", "cv=0.3"), 1, "error[S715]"),
        (("--slow", "1.2"), 2, "'1.2' names no slow devices; write how many times as long"),
        (("--slow", "1x1"), 2, "names no slow devices"),
        (("--slow", "nanx1"), 2, "names no slow devices"),
        (("--slow", "1.2x0"), 2, "names no slow devices"),
        (("--slow", "1e9x1"), 2, "names no slow devices"),
        (("--slow", "1.2x9"), 2, "--slow names 9 slow devices, and the cluster has 8: name fewer"),
        (("--tokens", "15X"), 2, "'15X' is no number of tokens"),
        (("--tokens", "nan"), 2, "no number of tokens"),
        (("--tokens", "0"), 2, "no number of tokens"),
        (("--tokens", "100"), 1, "error[S716]: a run of 100 tokens is shorter than a step"),
        (("--tokens", "1T", "--price", "0"), 2, "--price"),
        (("--price", "2"), 2, "add --tokens"),
        (("--tokens", "1T", "--mtbf", "100"), 2, "--checkpoint SECONDS and --restart SECONDS together"),
        (
            ("--tokens", "1T", "--mtbf", "1", "--checkpoint", "10", "--restart", "6000"),
            1,
            "error[S716]: 8 devices fail every 450 s",
        ),
    ],
)
def test_what_is_refused(more: tuple[str, ...], status: int, text: str) -> None:
    result = schedc("plan", *SEARCH, *more)
    assert (result.exit_code, text in result.stderr) == (status, True), result.stderr


@pytest.mark.slow
def test_a_fit_without_the_precision_is_refused_unless_forced(tmp_path: Path) -> None:
    model = ("gpt2", "a100-80", "-D", "devices=8", "--batch", "32x1024", "--top", "1", "--fit", shipped("bloom"))
    half = ("--require", "pp == 2 and tp == 1 and schedule in 1f1b and microbatch == 1 and zero == 1")
    assert schedc("plan", *model, *half, "--precision", "fp16").exit_code == 0
    eight = tmp_path / "eight.toml"
    eight.write_text(shipped_text("a100-80").replace("bf16 = 312e12", "bf16 = 312e12, fp8 = 624e12"))
    refused = schedc("plan", "gpt2", str(eight), *model[2:], *half, "--precision", "fp8")
    assert "error[S726]: the fit `bloom` has no row with precision fp8" in refused.stderr
    forced = schedc("plan", "gpt2", str(eight), *model[2:], *half, "--precision", "fp8", "--force-fit")
    first, *rest = forced.stdout.splitlines()
    assert first.endswith("a step of 32 sequences of 1,024 tokens, products in fp8")
    assert any(line.endswith("it has not seen this device or this precision (--force-fit)") for line in rest)


SKEWED = ("qwen3-30b-a3b", "h100", "-D", "devices=16", "--batch", "64x4096", "--top", "1", "--precision", "fp8")


@in_sweeps(
    "test_loads_spread_unless_their_skew_is_said",
    "compiler/planner/search/test_under_record.py::test_files_check_as_the_search_says",
)
@pytest.mark.slow
def test_a_skew_and_a_precision_reach_the_files(tmp_path: Path) -> None:
    """The fullest rank takes longer, a precision of 8 bits less long, and `check` says the same of the files."""
    same = "pp == 4 and ep == 4 and tp == 1 and cp == 1 and vpp == 1 and zero == 1 and microbatch == 1"
    axes = ("--require", f"{same} and schedule in 1f1b and recompute == act and layout == even and alltoall == flat")
    folder = tmp_path / "plans"
    result = schedc("plan", *SKEWED, *axes, "--skew", "1.5", "--json", "-o", str(folder))
    facts = json.loads(result.stdout)
    assert (facts["precision"], facts["skew"]) == ("fp8", 1.5)
    (plan,) = facts["plans"]
    bars = {bar["what"]: bar["seconds"] for bar in plan["waterfall"]}
    assert bars["expert imbalance"] > 0
    even = json.loads(schedc("plan", *SKEWED, *axes, "--skew", "1", "--json").stdout)
    assert even["plans"][0]["step_s"] < plan["step_s"]
    wide = json.loads(schedc("plan", *SKEWED[:-2], *axes, "--skew", "1", "--json").stdout)
    assert wide["plans"][0]["step_s"] > even["plans"][0]["step_s"]
    path = folder / "01.sched"
    assert "## Times of products in fp8; no line says it.\n## Times with 1.5 times" in path.read_text()
    assert schedc("fmt", "--check", str(path)).exit_code == 0
    checked = schedc("check", str(path), "--cost-file", str(path.with_suffix(".costs.toml")), "--json")
    facts = json.loads(checked.stdout)
    assert facts["makespan"] == pytest.approx(plan["makespan_s"], rel=1e-9)
    needed, between = plan["memory"]["needed_bytes"], max(facts["peak_memory"])
    (note,) = (note for note in facts["plan"]["notes"] if note.startswith("The fullest rank needs"))
    parts = f"{shown(between)} between ops, and {shown(needed - between)} of buffers"
    assert note.startswith(f"The fullest rank needs {shown(needed)} of")
    assert parts in note


@pytest.mark.slow
def test_loads_spread_unless_their_skew_is_said(tmp_path: Path) -> None:
    """Everything that says a step says that the spread is assumed. The step and its memory are those of cv=0.4."""
    where = "pp == 4 and ep == 4 and tp == 1 and cp == 1 and vpp == 1 and zero == 1 and microbatch == 1"
    asked = ("plan", *SKEWED[:-2], "--require", f"{where} and schedule in 1f1b and alltoall == flat", "--draws", "20")
    text = schedc(*asked, "-o", str(tmp_path / "plans")).stdout
    assert "\nrows      loads of experts spread by 0.4 of their mean: assumed; say --skew or --routing\n" in text
    facts = json.loads((tmp_path / "plans" / "plans.json").read_text())
    assert (facts["spread"], facts["spread_assumed"], facts["chances"]["loads"]["median"]) == (0.4, True, 0.4)
    assumed = "as loads of experts spread by 0.4 of their mean, assumed"
    checked = schedc("check", str(tmp_path / "plans" / "01.sched"))
    assert f"note: Times with {fullest_rank(128, 4, 0.4):.4g} times the mean rows" in checked.stdout
    assert assumed in checked.stdout
    assert "loads of experts spread by 0.4 of their mean: assumed" in (tmp_path / "plans" / "index.html").read_text()
    said, even = (json.loads(schedc(*asked, "--skew", skew, "--json").stdout) for skew in ("cv=0.4", "1"))
    (plan,), (same,), (less,) = (each["plans"] for each in (facts, said, even))
    assert (plan["step_s"], plan["memory"]["needed_bytes"]) == (same["step_s"], same["memory"]["needed_bytes"])
    assert plan["step_high_s"] > same["step_high_s"]
    assert (said["spread_assumed"], said["chances"]["loads"]) == (False, None) == (even["spread_assumed"], None)
    assert less["step_s"] < same["step_s"]


def test_a_search_that_ends_early_says_what_is_open() -> None:
    wide = ("llama-3.1-8b", "h100", "-D", "devices=64", "--batch", "512x4096", "--require", "pp >= 4")
    result = schedc("plan", *wide, "--limit-seconds", "0.1", "--json")
    facts = json.loads(result.stdout)
    certificate = facts["certificate"]
    assert (result.exit_code, certificate["complete"]) == (0, False)
    best = min((plan["step_s"] for plan in facts["plans"]), default=float("inf"))
    assert 0 < certificate["bound_s"] <= best


@pytest.mark.sweep
@pytest.mark.slow
def test_plans_of_megatron_core_are_exported(tmp_path: Path) -> None:
    """Every plan of the restriction, with experts and without, becomes flags."""
    count = swept(12, 4)
    both = (("qwen3-30b-a3b", "tp <= 2 and microbatch <= 2"), ("llama-3.1-8b", "cp == 1"))
    for model, axes in both[: swept(2, 1)]:
        folder = tmp_path / model
        search = (model, "h100", "-D", "devices=16", "--batch", "64x4096", "--restrict", "megatron-core")
        assert schedc("plan", *search, "--require", axes, "--top", str(count), "-o", str(folder)).exit_code == 0
        plans = sorted(folder.glob("*.sched"))
        assert len(plans) == count
        for plan in plans:
            result = schedc("export", str(plan), "--to", "megatron")
            assert result.exit_code == 0, result.output


@in_sweeps(
    "test_loads_spread_unless_their_skew_is_said",
    "compiler/planner/search/test_under_record.py::test_files_check_as_the_search_says",
)
@pytest.mark.slow
def test_a_recorded_routing_skews_groups_as_it_has_them(tmp_path: Path) -> None:
    """Ranks of a group of two have the rows of two recorded neighbours."""
    asked = ("plan", "qwen3-30b-a3b", "h100", "-D", "devices=16", "--batch", "64x4096", "--top", "1", "--json")
    where = "pp == 2 and tp == 1 and schedule in 1f1b and zero == 1 and microbatch == 1 and cp == 1 and ep"
    record = tmp_path / "routing.json"
    record.write_text(json.dumps({"schema": "schedc.routing/1", "rows": [[[[28, 24, 26, 22]], [[22, 27, 25, 26]]]]}))
    for ep, fullest in ((4, (1.12 + 1.08) / 2), (2, (1.04 + 1.02) / 2)):
        steps = []
        for skew in (("--routing", str(record)), ("--skew", repr(fullest))):
            result = schedc(*asked, "--require", f"{where} == {ep}", *skew)
            assert result.exit_code == 0, result.stderr
            facts = json.loads(result.stdout)
            steps.append(facts["plans"][0]["step_s"])
            if skew[0] == "--routing":
                assert "recorded rows of the fullest rank over the mean: 1.03 of 2, 1.1 of 4 ranks" in "; ".join(
                    facts["space"]["restrictions"]
                )
        assert steps[0] == pytest.approx(steps[1], rel=1e-12)
    for text, rows, message in (
        ("{", None, "is not JSON"),
        ("", [[[[1, 2, 3]]]], "has the rows of 3 ranks"),
        ("", [[[[1]]]], "has the rows of 1 ranks"),
        ("", [[[[1, 0, 0, 0]]]], "no spread of loads gives the fullest rank 4 times the mean"),
    ):
        record.write_text(text or json.dumps({"schema": "schedc.routing/1", "rows": rows}))
        refused = schedc(*asked, "--routing", str(record))
        assert refused.exit_code == 1
        assert "error[S715]" in refused.stderr
        assert message in refused.stderr
    assert "give one" in schedc(*asked, "--routing", str(record), "--skew", "2").stderr


@in_sweeps("test_loads_spread_unless_their_skew_is_said")
@pytest.mark.slow
def test_a_spread_of_loads_skews_larger_groups_more() -> None:
    """And 1.2@4 is the spread at which the fullest of four ranks has 1.2 times the mean."""
    asked = ("plan", "qwen3-30b-a3b", "h100", "-D", "devices=16", "--batch", "64x4096", "--top", "1", "--json")
    where = "pp == 2 and tp == 1 and schedule in 1f1b and zero == 1 and microbatch == 1 and cp == 1"

    def step(ep: int, *skew: str) -> dict[str, Any]:
        result = schedc(*asked, "--require", f"{where} and ep == {ep}", *skew)
        assert result.exit_code == 0, result.stderr
        facts: dict[str, Any] = json.loads(result.stdout)
        return facts

    spread = step(4, "--skew", "1.2@4")["spread"]
    assert fullest_rank(128, 4, spread) == pytest.approx(1.2)
    for ep in (4, 8):
        by_law, fixed = (
            step(ep, "--skew", each)["plans"][0]["step_s"]
            for each in (f"cv={spread!r}", f"{fullest_rank(128, ep, spread)!r}")
        )
        assert by_law == pytest.approx(fixed, rel=1e-12)
    unreached = schedc(*asked, "--skew", "300@16")
    assert "error[S715]: no spread of loads gives the fullest of 16 ranks 300 times" in unreached.stderr
