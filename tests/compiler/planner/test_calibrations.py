"""Fits of calibrations: constants found again from times of parts alone, spreads, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.planner.fit.calibration import SPREAD, predicted_times
from schedc.planner.fit.estimate import at
from schedc.planner.fit.rows import MeasuredRows, load_rows
from schedc.planner.presets.library import open_cluster
from schedc.planner.presets.tables import files
from schedc.planner.times.table import RunTable
from support.needs import needed

HEAD = (
    "model,layers,hidden,ffn,heads,seq,cluster,microbatch,batch,pp,dp,ep,gated,experts,top,width,shared,kv_heads,"
    "step_s,calibration\n"
)
SMALL = "small,4,1024,,16,2048,a100-80,2,16,2,2,2,1,16,2,512,1,,,small.toml\n"
LARGE = "large,4,4096,,32,4096,a100-80,4,32,2,2,2,1,64,4,2048,1,,,large.toml\n"
DENSE = "dense,4,2048,8192,16,2048,a100-80,2,16,2,2,1,0,,,,,,,dense.toml\n"
TRUTH = {"gemm": 0.7, "hbm": 0.6, "grouped": 0.45, "attention": 0.4, "launch": 1.5e-3, "ep": 0.4, "p2p": 0.6}


def calibrated(folder: Path, *lines: str) -> MeasuredRows:
    """The rows, whose cost files have the times that the cost model gives under `TRUTH`."""
    rows = folder / "rows.csv"
    for line in lines:
        (folder / line.strip().rpartition(",")[2]).write_text(cost_text(line, folder), encoding="utf-8")
    rows.write_text(HEAD + "".join(lines), encoding="utf-8")
    return load_rows(rows)


def cost_text(line: str, folder: Path) -> str:
    """The cost file of a row, in milliseconds."""
    rows = folder / "rows.csv"
    rows.write_text(HEAD + line.rpartition(",")[0].rpartition(",")[0] + ",1.0,\n", encoding="utf-8")
    run = load_rows(rows).rows[0].run
    known = predicted_times(RunTable([run]), at(TRUTH))
    ms = {name: 1e3 * float(time.item()) for name, time in known.items()}
    lines = ['schema = "schedc.costs/1"', "[ops]", f"p2p = {ms['p2p']}"]
    if run.model.moe is None:
        stages = range(run.axes.stages)
        return "\n".join([*lines, *(f"{way} = {[ms[f'stage.{stage}.{way}'] for stage in stages]}" for way in "FIW")])
    lines += ["[cell]", 'stages = "moe*2"', 'method = "flat"']
    for role in ("attention", "permute", "experts", "shared", "post"):
        values = [f"{way} = {ms[role + '.' + way]}" for way in "FIW"]
        lines.append(f"{role} = {{ {', '.join(values)} }}")
    for exchange in ("dispatch", "combine"):
        lines.append(f"{exchange} = {{ node = [{ms[f'{exchange}.node.F']}, {ms[f'{exchange}.node.B']}] }}")
    return "\n".join(lines) + "\n"


def test_constants_are_found_again_without_a_step(tmp_path: Path) -> None:
    needed("scipy")
    measured = calibrated(tmp_path, SMALL, LARGE, DENSE)
    assert [len(row.times) for row in measured.calibrated] == [18, 18, 7]
    assert not measured.rows
    result = CliRunner().invoke(main, ["fit", str(tmp_path / "rows.csv"), "--cv", "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert (facts["rows"], facts["times"]) == (0, 43)
    assert facts["times_mape_pct"] < 4
    found = {name: facts["constants"][name]["value"] / value for name, value in TRUTH.items()}
    assert found == pytest.approx(dict.fromkeys(TRUTH, 1.0), rel=0.25)
    assert {"step", "chunk"} <= set(facts["at_prior"])  # no part of a model knows them
    text = CliRunner().invoke(main, ["fit", str(tmp_path / "rows.csv")], catch_exceptions=False).stdout
    assert "mean error of 43 times of parts" in text


def test_sums_of_gradients_decide_their_share_of_the_nics(tmp_path: Path) -> None:
    """16 replicas on two nodes at 0.3 of the NICs: the prior is 0.6. Replicas of one device sum nothing."""
    needed("scipy")
    levels = open_cluster("a100-80", 16).levels
    sent = 15 / 16 * 1e9 / (8 * 0.3 * open_cluster("a100-80", 16).device_Bps(levels[1]))
    seconds = 7 * levels[0].alpha_s + levels[1].alpha_s + sent
    (tmp_path / "sums.toml").write_text(f'schema = "schedc.costs/1"\n[ops]\ndp = {1e3 * seconds!r}\n', encoding="utf-8")
    row = DENSE.replace("2,16,2,2,1", "1,16,1,16,1").replace("dense.toml", "sums.toml")
    (tmp_path / "rows.csv").write_text(HEAD + row, encoding="utf-8")
    result = CliRunner().invoke(main, ["fit", str(tmp_path / "rows.csv"), "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert facts["times"] == 1
    assert facts["constants"]["dp"]["value"] == pytest.approx(0.3, rel=0.05)
    (tmp_path / "rows.csv").write_text(HEAD + row.replace("1,16,1,16,1", "1,16,1,1,1"), encoding="utf-8")
    with pytest.raises(DiagnosticError, match="has no time that the cost model predicts"):
        load_rows(tmp_path / "rows.csv")


def test_a_time_measured_twice_counts_by_its_spread(tmp_path: Path) -> None:
    calibrated(tmp_path, SMALL)
    text = (tmp_path / "small.toml").read_text(encoding="utf-8")
    value = next(line for line in text.splitlines() if line.startswith("p2p")).partition(" = ")[2]
    (tmp_path / "again.toml").write_text(text.replace(value, str(2 * float(value))), encoding="utf-8")
    (tmp_path / "rows.csv").write_text(HEAD + SMALL + SMALL.replace("small.toml", "again.toml"), encoding="utf-8")
    rows = load_rows(tmp_path / "rows.csv").calibrated
    spreads = {time.name: time.spread for time in rows[0].times}
    assert spreads["p2p"] == pytest.approx(np.log(2) / np.sqrt(2))
    assert spreads["attention.F"] < SPREAD  # equal both times


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (SMALL.replace(",,small.toml", ",1.0,small.toml"), "S723"),
        (SMALL.replace("small.toml", "none.toml"), "S405"),
        (SMALL.replace("small.toml", "empty.toml"), "S723"),
        (DENSE.replace("16,2,2,1,0", "16,4,2,1,0"), "S723"),
    ],
)
def test_calibrations_that_say_nothing_of_their_row_are_refused(line: str, code: str, tmp_path: Path) -> None:
    calibrated(tmp_path, SMALL, DENSE)
    (tmp_path / "empty.toml").write_text('schema = "schedc.costs/1"\n', encoding="utf-8")
    (tmp_path / "rows.csv").write_text(HEAD + line, encoding="utf-8")
    with pytest.raises(DiagnosticError) as caught:
        load_rows(tmp_path / "rows.csv")
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code]


def test_a_shipped_cluster_is_a_name(tmp_path: Path) -> None:
    assert "a100-80" in files("clusters")
    assert calibrated(tmp_path, SMALL).devices == {"A100 SXM 80 GB"}
