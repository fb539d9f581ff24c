"""Fits of constants: step times by hand, constants found again, rows that no fit has seen, and rows refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.model.sizes import AttentionSizes, ModelSizes
from schedc.planner.cluster.read import load_cluster
from schedc.planner.fit.estimate import Estimator, at
from schedc.planner.fit.fitted import beyond, fit_for, fit_text, load_fit
from schedc.planner.fit.fitting import fit_rows
from schedc.planner.fit.predict import predict
from schedc.planner.fit.rows import load_rows
from schedc.planner.fit.units import check_units
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files
from schedc.planner.price.files import planned_run
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan, step_seconds
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.spread import ROW_SPREAD
from schedc.planner.times.table import RunTable
from schedc.report.shipped import library_json, library_text
from support.needs import needed
from support.paths import ROOT
from support.short_search import short_search
from support.sweeps import swept
from support.training_runs import run_of

PUBLISHED = ROOT / "benchmarks" / "published"
A100 = load_cluster(PUBLISHED / "clusters" / "a100-800g.toml")
MODEL = ModelSizes("m", 24, 2048, 51200, AttentionSizes(16, 16, 128, 128), ffn=8192, gated=False, seq=1024)
PRIORS = {constant.name: constant.median for constant in CONSTANTS}


def steps(*runs: TrainingRun, **constants: float) -> np.ndarray:
    return step_seconds(RunTable(runs), at(PRIORS | constants))[:, 0]


def test_one_rank_repeats_its_microbatch() -> None:
    """M microbatches on one device take M times as long as one, but for what each step has once."""
    one, two, four = (run_of(MODEL, A100, microbatches=count) for count in (1, 2, 4))
    a, b, c = steps(one, two, four)
    assert c - b == pytest.approx(2 * (b - a), rel=1e-12)


def test_products_alone_take_their_flops() -> None:
    """Without launches, memory or scores, a step is 6 FLOPs per weight and token at the fitted share of peak."""
    big = ModelSizes("big", 4, 16384, 256, AttentionSizes(128, 128, 128, 128), ffn=65536, gated=False, seq=2048)
    run = run_of(big, A100, microbatch=8, precision="bf16")
    tiny = {"launch": 1e-9, "chunk": 1e-9, "step": 1e-9, "host": 1e-9, "gemm_k0": 1e-6, "hbm": 1e6, "attention": 1e6}
    (time,) = steps(run, gemm=1.0, **tiny)
    weights = 4 * (4 + 8) * 16384**2 + 256 * 16384
    assert time == pytest.approx(6 * weights * 8 * 2048 / 312e12, rel=0.03)  # blocks that do not fill the last wave


def test_ranks_add_a_ramp_and_exchanges_take_time() -> None:
    four = run_of(MODEL, A100, pp=4, microbatches=8)
    alone, more = steps(four), steps(run_of(MODEL, A100, pp=4, microbatches=16))
    assert 1.5 < more / alone < 2.0  # eight more microbatches, and the same ramp
    slow = [steps(run_of(MODEL, A100, tp=tp, microbatches=8))[0] for tp in (1, 8)]
    assert slow[0] / 8 < slow[1] < slow[0]
    assert steps(run_of(MODEL, A100, tp=16), tp_nodes=0.1) > steps(run_of(MODEL, A100, tp=16), tp_nodes=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("vtrain_multi", 6.5), ("bloom", 5.0)])
def test_shipped_fits_predict_published_steps(name: str, most: float) -> None:
    rows = load_rows(PUBLISHED / f"{name}.csv").rows
    fit = load_fit(PUBLISHED / f"{name}.fit.toml")
    predicted = step_seconds(RunTable([row.run for row in rows]), at(fit.constants))[:, 0]
    errors = predicted / np.array([row.step_s for row in rows]) - 1
    assert 100 * np.abs(errors).mean() <= most
    assert fit.rows == len(rows)


def test_constants_are_found_again() -> None:
    """Steps that the model itself made, by constants away from their priors, lead back to these constants."""
    needed("scipy")
    runs = [
        run_of(MODEL, A100, tp=tp, pp=pp, microbatch=size, microbatches=count)
        for tp, pp in ((1, 1), (2, 1), (1, 2), (8, 1), (2, 2))
        for size in (1, 8, 32)
        for count in (1, 4)
    ]
    truth = {"gemm": 0.7, "launch": 3e-3, "tp": 0.4}
    estimator = Estimator(RunTable(runs), steps(*runs, **truth))
    estimate = estimator.estimate(np.arange(len(runs)))
    assert np.abs(estimator.predict(estimate.position) / estimator.step_s - 1).max() < 0.03
    assert {name: estimate.constants[name] / value for name, value in truth.items()} == pytest.approx(
        dict.fromkeys(truth, 1.0), rel=0.15
    )
    assert "attention" not in estimate.at_bound


@pytest.mark.parametrize(("noise", "spread"), [(0.0, 0.01), (0.4, 0.05)])
def test_rows_that_agree_outweigh_priors(noise: float, spread: float) -> None:
    """Steps far from the prior's decide where all agree; where they differ by factors, the prior keeps its weight."""
    needed("scipy")
    runs = [run_of(MODEL, A100, microbatch=size, microbatches=count) for size in (1, 4) for count in (1, 2, 4)]
    seconds = steps(*runs, host=0.4 / MODEL.layers, step=1e-9)
    estimator = Estimator(RunTable(runs), seconds * np.exp(noise * np.resize([-1.0, 1.0], seconds.size)))
    rows = np.arange(len(runs))
    first, found = estimator.at_spread(rows, ROW_SPREAD), estimator.estimate(rows)
    assert estimator.spread_of(rows, first) == pytest.approx(spread)
    off = [
        abs(np.log((each.constants["step"] + MODEL.layers * each.constants["host"]) / 0.4)) for each in (first, found)
    ]
    assert off[1] < 0.5 * off[0] if noise == 0 else off[1] == pytest.approx(off[0], rel=1e-2)


@pytest.mark.slow
def test_the_command_writes_a_fit_and_names_what_it_left_out(tmp_path: Path) -> None:
    needed("scipy")
    out = tmp_path / "k.fit.toml"
    arguments = ["fit", str(PUBLISHED / "zerobubble_t4.csv"), "--called", "1f1b", "--json", "-o", str(out)]
    result = CliRunner().invoke(main, arguments)
    facts = json.loads(result.stdout)
    assert facts["fit_mape_pct"] < 4
    assert len(facts["left_out"]) + facts["rows"] == 39
    assert all(row["reason"] for row in facts["left_out"])
    assert {"split"}.isdisjoint(facts["constants"])  # no such row has a split backward
    fit = load_fit(out)
    assert fit_text(fit) == out.read_text(encoding="utf-8")
    assert fit.seen["pp"] == (8, 32)
    assert list(beyond(fit.seen, {"pp": 64, "tp": 1, "schedule": "1f1b"})) == ["pp 64 (rows: 8 to 32)"]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", swept(["zerobubble_t4", "zerobubble_t6"], ["zerobubble_t4"]))
def test_constants_of_1f1b_predict_zero_bubble_schedules(name: str, tmp_path: Path) -> None:
    """The reduced form takes every fourth row of the smaller table."""
    heading, *rows = (PUBLISHED / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    shutil.copytree(PUBLISHED / "clusters", tmp_path / "clusters")
    path = tmp_path / f"{name}.csv"
    path.write_text("\n".join([heading, *rows[:: swept(1, 4)]]), encoding="utf-8")
    fit = str(PUBLISHED / "zerobubble_t4.fit.toml")
    arguments = ["plan", "predict", str(path), "--fit", fit, "--json"]
    facts = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert {"1F1B", "ZB-1p", "ZB-2p"} < set(facts["by_schedule"])
    assert max(each["mape_pct"] for each in facts["by_schedule"].values()) <= 3


def test_predictions_stand_beside_measured_time_and_memory() -> None:
    arguments = ["plan", "predict", str(PUBLISHED / "simumax_b200.csv"), "--json"]
    facts = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert facts["memory"]["mape_pct"] <= 3
    assert facts["memory"]["worst_pct"] <= 6
    assert facts["time"]["mape_pct"] <= 10
    assert facts["by_schedule"]["1F1B"]["rows"] + facts["by_schedule"]["1f1b"]["rows"] == len(facts["rows"]) == 43
    foreign = [*arguments, "--fit", str(PUBLISHED / "bloom.fit.toml")]
    refused = CliRunner().invoke(main, foreign)
    assert refused.exit_code == 1
    assert "S726" in refused.stderr
    forced = json.loads(CliRunner().invoke(main, [*foreign, "--force-fit"]).stdout)
    assert forced["forced"]
    assert forced["unseen"] == ["B200 SXM 180 GB"]
    assert forced["time"]["mape_pct"] > facts["time"]["mape_pct"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1",
        'schema = "schedc.fit/1"\nname = 3\n[constants]\ngemm = nan\nx = 1',
        'schema = "schedc.fit/1"\nname = "a"\nrows = 1\ndevices = []\nprecisions = []\n'
        "[seen]\ntp = [1]\npp = 3\nqq = [1, 2]\n[constants]\ngemm = 0.7",
    ],
)
def test_a_file_that_is_no_fit_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.fit.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DiagnosticError) as caught:
        load_fit(path)
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} == {"S725"}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (",0.8,", ",nan,", "S722"),
        (",0.8,10240", ",,", "S722"),
        (",0.8,10240", ",0.8", "S722"),
        ("GPT-1B,24", "GPT-1B,0", "S723"),
        ("cluster.toml,4,64", "cluster.toml,5,64", "S723"),
        ("cluster.toml,4", "none.toml,4", "S705"),
        ("GPT-1B,24", "GPT-1B,20000", "S722"),
        ("4,64,8,0.8,10240\n", "4,64,8,0.8,11000\n", "S723"),
        ("batch,dp", "batch,batch", "S721"),
        ("GPT-1B", '"GPT-1B', "S720"),
    ],
)
def test_rows_are_refused_in_their_place(old: str, new: str, code: str, tmp_path: Path) -> None:
    from schedc.codes import CODES

    (tmp_path / "cluster.toml").write_text(CODES["S705"].right, encoding="utf-8")
    path = tmp_path / "rows.csv"
    right = CODES["S720"].right
    assert old in right
    path.write_text(right.replace(old, new), encoding="utf-8")
    with pytest.raises(DiagnosticError) as caught:
        load_rows(path)
    assert caught.value.diagnostics[0].code == code


@pytest.mark.parametrize(("factor", "words"), [(1000.0, "milliseconds"), (0.001, "kiloseconds")])
def test_a_row_in_another_unit_is_refused_in_its_place(factor: float, words: str) -> None:
    rows = load_rows(PUBLISHED / "korthikanti.csv")
    predicted = steps(*rows.runs)
    check_units(rows, predicted)
    check_units(replace(rows, rows=tuple(replace(row, step_s=row.step_s * factor) for row in rows.rows)), predicted)
    second = replace(rows.rows[1], step_s=rows.rows[1].step_s * factor)
    mixed = replace(rows, rows=(rows.rows[0], second, *rows.rows[2:]))
    for checked in (lambda: predict(mixed, {}), lambda: fit_rows(mixed, "mixed", cross_validate=False)):
        with pytest.raises(DiagnosticError) as raised:
            checked()
        (finding,) = raised.value.diagnostics
        assert (finding.code, finding.primary.span.line) == ("S723", second.line)
        assert words in finding.message


def test_a_cluster_names_its_fit() -> None:
    fit = fit_for(open_cluster("ascend-910b"), "bf16")
    assert fit is not None
    assert (fit.name, fit.devices, fit.unseen) == ("mindspeed_rc2", ("Ascend 910B 64 GB",), ())
    fp16 = fit_for(open_cluster("a100-80"), "bf16")  # its rows are in fp16, whose products take as long
    assert fp16 is not None
    assert (fp16.precisions, fp16.unseen) == (("fp16",), ())
    clocked = fit_for(open_cluster("h100"), "fp8")
    assert clocked is not None
    assert not [name for name in clocked.constants if name.startswith("sustained")]
    assert clocked.constants["fp8"] > load_fit(files("fits")["mbridge_26_04_01"]).constants["fp8"]
    assert fit_for(open_cluster("h800"), "bf16") is None  # nobody has published rows of it with sizes


def test_shipped_fits_are_those_beside_their_rows() -> None:
    for name, path in files("fits").items():
        assert path.read_text(encoding="utf-8") == (PUBLISHED / f"{name}.fit.toml").read_text(encoding="utf-8")
    facts = library_json()
    assert set(facts["fits"]) == set(files("fits"))
    assert any("mindspeed_rc2" in line and "32 rows" in line for line in library_text(facts))
    named = {open_cluster(name).fit for name in files("clusters")} - {""}
    assert named == set(files("fits"))


def test_a_fit_without_the_device_or_the_precision_is_refused_or_forced() -> None:
    cluster, path = open_cluster("h800"), files("fits")["mindspeed_rc2"]
    with pytest.raises(DiagnosticError) as caught:
        fit_for(cluster, "fp8", path)
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["S726", "S726"]
    forced = fit_for(cluster, "fp8", path, forced=True)
    assert forced is not None
    assert forced.unseen == ("H800 SXM 80 GB", "fp8")
    assert forced.constants == load_fit(path).constants


def test_a_cluster_names_a_fit_beside_its_file(tmp_path: Path) -> None:
    text = files("clusters")["ascend-910b"].read_text(encoding="utf-8")
    shutil.copyfile(files("fits")["mindspeed_rc2"], tmp_path / "own.fit.toml")
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace('"mindspeed_rc2"', '"own.fit.toml"'), encoding="utf-8")
    fit = fit_for(load_cluster(path), "fp16")
    assert fit is not None
    path.write_text(text.replace('"mindspeed_rc2"', '"mindspeed"'), encoding="utf-8")
    with pytest.raises(DiagnosticError) as caught:
        fit_for(load_cluster(path), "fp16")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.primary.span.line, diagnostic.help) == (
        "S706",
        3,
        "did you mean `mindspeed_rc2`?",
    )


@pytest.mark.parametrize(
    ("schedule", "sizes", "message"),
    [
        ("interleaved_1f1b", "4,2,4,64", "takes"),
        ("1f1b", "4,2,8,64", "it has not pp*vpp = 8 stages"),
        ("one_f_one_b", "4,1,8,64", "`one_f_one_b` at pp = 4"),
        ("x" * 3000, "4,1,8,64", "xxx` at pp = 4"),
        ("1f1b", "4,1,1,1000000", "ops; 500,000 are the most"),
    ],
)
def test_rows_whose_schedule_does_not_take_their_sizes_are_refused(
    schedule: str, sizes: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    head = "model,layers,hidden,heads,seq,cluster,step_s,microbatch,schedule,pp,vpp,dp,batch\n"
    path.write_text(f"{head}GPT,24,2048,16,1024,a100-80,0.8,1,{schedule},{sizes}\n", encoding="utf-8")
    if message == "takes":
        assert len(load_rows(path).rows) == 1
        return
    with pytest.raises(DiagnosticError) as caught:
        load_rows(path)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.primary.span.line) == ("S723", 2)
    assert message in diagnostic.message


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("64,1,1,8,even", ""),
        ("66,1,1,6,even", "6 spare devices of a domain leave part of a node of 4 devices"),
        ("64,1,1,72,even", "72 spare devices in domains of 72"),
        ("1,8,3,0,ends", "layout `ends`: 24 stages do not divide 32 parts"),
        ("1,8,4,0,ends", ""),
    ],
)
def test_rows_that_split_a_node_or_a_part_are_refused(cells: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    head = "model,layers,hidden,heads,seq,cluster,step_s,microbatch,schedule,batch,dp,pp,vpp,spare,layout\n"
    row = f"GPT,30,2048,16,1024,gb200-nvl72,0.8,1,interleaved_1f1b,{64 * 66},{cells}\n"
    path.write_text(head + (row if ",1,1," not in row else row.replace("interleaved_1f1b", "1f1b")), encoding="utf-8")
    if not message:
        assert len(load_rows(path).rows) == 1
        return
    with pytest.raises(DiagnosticError, match="S723") as caught:
        load_rows(path)
    assert message in caught.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("schedule", "experts", "message"),
    [
        ("1f1b", "8,2,64,8", ""),
        ("interleaved_overlap", "8,2,64,8", ""),
        ("gpipe", "8,2,64,8", "it has no pairs for exchanges to run beside"),
        ("1f1b", "0,0,0,1", "a model without experts sends no rows"),
    ],
)
def test_rows_whose_exchanges_hide_are_plans_with_pairs(
    schedule: str, experts: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    head = "model,layers,hidden,heads,seq,cluster,step_s,microbatch,hides_rows,schedule,pp,vpp,dp,batch"
    sizes = "4,2,8,64" if schedule == "interleaved_overlap" else "4,1,8,64"
    row = f"GPT,24,2048,16,1024,a100-80,0.8,1,1,{schedule},{sizes},{experts}"
    path.write_text(f"{head},experts,top,width,ep\n{row}\n", encoding="utf-8")
    if not message:
        axes = load_rows(path).rows[0].run.axes
        assert axes.overlap
        assert axes.schedule in ("1f1b_overlap", "interleaved_overlap")
        return
    with pytest.raises(DiagnosticError, match=message):
        load_rows(path)


def test_fewer_rows_than_constants_and_one_model_are_said(tmp_path: Path) -> None:
    needed("scipy")
    path = tmp_path / "rows.csv"
    head = "model,layers,hidden,heads,seq,ffn,cluster,microbatch,batch,dp,step_s\n"
    path.write_text(f"{head}GPT,24,2048,16,1024,8192,a100-80,4,64,8,0.8\n", encoding="utf-8")
    text = CliRunner().invoke(main, ["fit", str(path), "--cv"], catch_exceptions=False).stdout
    assert "1 measurement for 8 constants: the priors decide much of this fit" in text
    assert "all rows are of one model: no model can be left out" in text


@pytest.mark.slow
@short_search()
def test_the_fit_of_the_910b_meets_the_published_plan_of_718b() -> None:
    """TP 8 on attention, PP 16, VPP 2, EP 32 on 6,144 devices at 238 tokens/s each; 8,192 tokens (arXiv 2505.04519).

    The fit has dense rows alone, so that constants of experts stay at their priors. All-to-Alls of rows go in two steps
    beside other microbatches, as the paper says. There the layer of the prediction is in the stage before the head. The
    batch, and what is recomputed, are not published.
    """
    cluster = open_cluster("ascend-910b", 6144)
    fit = fit_for(cluster, "bf16")
    assert fit is not None
    run = run_of(
        replace(open_model("pangu-ultra-moe-718b"), seq=8192), cluster, tp=8, pp=16, vpp=2, dp=48, ep=32,
        microbatches=96, schedule="interleaved_overlap", sequence_parallel=True, zero=1, overlap=True, grad_bytes=4,
        alltoall="hierarchical", pairs=True, layout="apart",
    )  # fmt: skip
    table = PartTable.of_runs(RunTable([run]), at(fit.constants))
    plan = price_plan(planned_run(run, table, 0))
    assert run.problem.tokens / run.axes.devices / plan.step == pytest.approx(238, rel=0.15)
    assert plan.fits
