"""A search under a record prices its best plans with copies, says what it refused, and its files check alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedc.cell.recorded_rows import write_recording
from schedc.cli import main
from schedc.ir.arrays import Int64

MODEL = """schema = "schedc.model/1"
name = "small"
layers = 6
hidden = 2048
vocab = 151936
heads = 32
kv_heads = 4
head_dim = 128
ffn = 6144
[attention]
head_norms = true
[moe]
experts = 32
top = 4
width = 768
"""
ASKED = (
    "--batch",
    "16x4096",
    "-D",
    "devices=8",
    "--require",
    "pp == 2 and tp == 1 and cp == 1 and microbatch == 1 and zero == 1",
)
FEW = ("--require", "recompute == none and layout == even and alltoall == flat and microbatch == 1 and zero == 1")
ONE = ("--require", "schedule in 1f1b")
ORDERS = ("--require", "schedule in zbh1, dualpipev")


def recorded(skew: float, experts: int = 32) -> Int64:
    """Two steps of three microbatches on two ranks, of other sizes than all plans."""
    generator = np.random.default_rng(2)
    share = np.arange(1, experts + 1) ** -skew
    drawn = [generator.multinomial(1024, generator.permutation(share / share.sum()), (2, 3, 2)) for _ in range(6)]
    return np.array(drawn).swapaxes(0, 1)


def plan(folder: Path, *options: str, skew: float = 0.8, experts: int = 32) -> Result:
    (folder / "small.toml").write_text(MODEL)
    write_recording(folder / "r.npz", recorded(skew, experts))
    return CliRunner().invoke(main, ["plan", str(folder / "small.toml"), "h100", *ASKED, *options])


def under(folder: Path, *options: str, skew: float = 0.8) -> Result:
    return plan(folder, *FEW, *ORDERS, "--record", str(folder / "r.npz"), "--top", "3", *options, skew=skew)


@pytest.mark.slow
def test_files_check_as_the_search_says(tmp_path: Path) -> None:
    result = under(tmp_path, "-o", str(tmp_path / "plans"), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output.splitlines()[0])
    assert facts["plans"]
    steps = [entry["step_s"] for entry in facts["plans"]]
    assert steps == sorted(steps)
    assert not facts["certificate"]["complete"]
    assert facts["record"]["file"] == "r.npz"
    assert facts["record"]["microbatches"] == 3
    shared = [entry for entry in facts["plans"] if entry["axes"]["ep"] > 1]
    assert shared
    for entry in facts["plans"]:
        path = tmp_path / "plans" / entry["file"]
        costs = path.with_name(f"{path.stem}.costs.toml")
        checked = CliRunner().invoke(main, ["check", str(path), "--cost-file", str(costs), "--json"])
        assert checked.exit_code == 0, checked.output
        told = json.loads(checked.output)
        inside = told["cells"]["makespan"]["inside"] if entry["axes"]["ep"] > 1 else told["makespan"]
        assert inside == entry["makespan_s"]
        assert max(told["peak_memory"]) == entry["memory"]["peak_bytes"]
        assert not entry["line"] or f"\n  {entry['line']}\n" in path.read_text()
        bars = {bar["what"]: bar["seconds"] for bar in entry["waterfall"]}
        assert ("rows by rank, copies of experts" in bars) == (entry["axes"]["ep"] > 1)
        assert bars["context exchanges"] == 0
        assert sum(bar["seconds"] for bar in entry["waterfall"]) == pytest.approx(entry["step_s"], rel=1e-9)
    best = shared[0]["balance"]
    assert best["chosen"] == shared[0]["copies"] != "none"
    made = {row["name"]: row["makespan"] for row in best["candidates"] if not row["refused"]}
    assert made[best["chosen"]] == min(made.values())
    compared = CliRunner().invoke(main, ["plan", "compare", *(str(tmp_path / "plans" / f"0{n}.sched") for n in (1, 2))])
    assert compared.exit_code == 0, compared.output


@pytest.mark.slow
def test_text_says_which_copies_and_why(tmp_path: Path) -> None:
    text = under(tmp_path, "--require", "ep == 4").output
    assert "  copies  " in text
    assert "copies of experts in 01: hot auto 0." in text
    assert "none 0." in text.partition("copies of experts in 01")[2]
    assert "alone and with the best copies: " in text
    assert "--exclude 'ep > 1 and not overlap and schedule in " in text.replace("\n  ", " ")
    assert text.endswith("\n2 of 2 plans were priced under the record: another one may be faster\n")
    lines = text.partition("the space: ")[2].partition(";")[0]
    assert "hot" not in lines
    assert "migrate" in lines


def test_even_rows_copy_nothing(tmp_path: Path) -> None:
    """Equal shares and many rows: the plan without copies is as fast, and simpler."""
    rows = np.full((1, 6, 1, 2, 32), 512)
    plan(tmp_path, "--space-facts")
    write_recording(tmp_path / "r.npz", rows)
    asked = ["plan", str(tmp_path / "small.toml"), "h100", *ASKED, *FEW, *ONE, "--top", "1"]
    facts = json.loads(
        CliRunner().invoke(main, [*asked, "--require", "ep == 4", "--record", str(tmp_path / "r.npz"), "--json"]).output
    )
    assert facts["plans"][0]["copies"] == "none"
    assert [each["alone"] for each in facts["record"]["fullest"]] == [1.0] * len(facts["record"]["fullest"])


def test_what_a_record_cannot_answer_is_refused(tmp_path: Path) -> None:
    for options in (
        ("--explain",),
        ("--also", "ep=1"),
        ("--objective", "memory"),
        ("--skew", "2"),
        ("--exhaustive",),
    ):
        result = under(tmp_path, *options)
        assert result.exit_code == 2
        assert f"and {' '.join(options[: 2 if options[0] == '--objective' else 1])} does not know them" in result.output
    other = plan(tmp_path, "--record", str(tmp_path / "r.npz"), experts=16)
    assert other.exit_code != 0
    assert "has the rows of 16 experts, and small has 32" in other.output
    (tmp_path / "r.npz").write_text(json.dumps({"schema": "schedc.routing/1", "rows": [[[[28, 24]]]]}))
    asked = ["plan", str(tmp_path / "small.toml"), "h100", *ASKED, "--record", str(tmp_path / "r.npz")]
    assert "rows by rank alone" in CliRunner().invoke(main, asked).output
