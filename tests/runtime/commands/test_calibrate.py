"""Calibration: every part of a model timed once, made into a cost file that the compiler and the runtime read."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Action
from schedc.cell.serial import serial
from schedc.cell.standard_blocks import stage_shape
from schedc.cell.table import CellTable
from schedc.cli import main as schedc_main
from schedc.compiler import analyse
from schedc.ir.json import program_to_json
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, load_costs, parse_costs
from schedc_runtime import Pipeline
from schedc_runtime.commands import calibrate, run
from schedc_runtime.execute.cell_programs import asks_on_lane
from schedc_runtime.measure.kernel_times import counts_of, measure_kernels, points
from schedc_runtime.measure.stage_times import (
    Bench,
    StageTimes,
    costs_of_stages,
    first_slice,
    measure_stages,
    merged,
    rows_of_slices,
    slice_factor,
)
from schedc_runtime.measure.sum_times import SUMMED_MEGABYTES, per_gigabyte, time_halves
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.collectives import SoloCommunicator
from support.needs import needs
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe
from support.tensor_cases import family
from support.warm_command import run_schedc

PLAN = """sched 1

plan small = dualpipev(P = 1, M = 2) {
  layers 3 dense 1
  experts 8 top 2 shared 1
  topology nodes 1 x 2
  overlap auto
}
"""
TINY = ["--width", "8", "--tokens", "4", "--rows", "2"]


def measured(model: torch.nn.Module, stages: int, *, split: bool = True, overlap: bool = False) -> list[StageTimes]:
    parts = partition(model, stages)
    batch, targets = tokens(2)
    boundaries = infer_boundaries(parts, (batch,))
    bench = Bench(ExpertGroup.solo(), torch.device("cpu"), warmup=1, repetitions=3)
    inputs = boundaries[0].pack(parts.bind((batch,)))
    return measure_stages(
        parts, boundaries, inputs, targets, next_token_loss, bench, split=split, segmented=overlap
    )  # fmt: skip


def test_every_part_of_a_stage_is_timed_in_every_repetition() -> None:
    """With the host as a lane, as on a GPU."""
    model = small_moe(3, 1)
    for _, layer in moe_layers(model):
        layer.attach(ExpertGroup.solo(), host_lane=True)
    stages = measured(model, 2)
    for stage in stages:
        assert stage.shape is not None
        steps = [step for kind in ("F", "B") for step in serial(kind, stage.shape, stage.shape).steps]
        expected = {f"{half} {stage.shape.names[node]}" for action, half, node in steps if action is not Action.START}
        assert stage.samples.keys() == expected | {"forward loss", "backward loss"}
        assert {len(times) for times in stage.samples.values()} == {3}
        assert min(min(times) for times in stage.samples.values()) > 0
    costs = costs_of_stages(stages, "flat")
    assert isinstance(costs.F, tuple)
    assert costs.F[0] == pytest.approx(
        sum(sorted(times)[1] for key, times in stages[0].samples.items() if key.startswith("forward ")), rel=1e-4
    )
    assert costs.cell is not None
    assert costs.cell.blocks == (("dense", "moe"), ("moe", "moe"))
    roles = {name for name, _ in costs.cell.costs.segments}
    assert roles == {"dense", "attention", "shared", "plan", "permute", "experts", "post"}
    assert dict(costs.cell.costs.exchanges)["sizes.host"].forward > 0
    assert [shape.names for shape in costs.cell.shapes(2)] == [stage.shape.names for stage in stages if stage.shape]
    assert parse_costs(Source("costs.toml", dump_costs(costs))) == costs


@pytest.mark.slow
@pytest.mark.parametrize(("split", "overlap"), [(True, False), (False, False), (True, True)])
def test_dense_models_are_timed_as_they_are_run(split: bool, overlap: bool) -> None:
    model = small_gpt(4)
    stages = measured(model, 2, split=split, overlap=overlap)
    costs = costs_of_stages(stages, "flat")
    assert all(isinstance(value, tuple) and min(value) > 0 for value in (costs.F, costs.I, costs.W))
    assert (costs.B is None) == split
    assert (costs.cell is not None) == overlap
    if not split:  # the split backward beside the whole one, each in every repetition
        names = ("forward", "backward", "weight", "unsplit")
        assert [{key: len(times) for key, times in x.samples.items()} for x in stages] == [
            {f"{name} ": 3 for name in names}
        ] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = next_token_loss(model(tokens(2)[0]), tokens(2)[1])  # the model is as it was before
    loss.backward()
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize("split", [True, False])
def test_each_number_is_measured_or_not_in_the_file(split: bool) -> None:
    """Whole backwards of 8 ms, of which split ones take 5 and 2."""
    split_times = {"forward ": [3.0], "backward ": [5.0], "weight ": [2.0]}
    stages = [StageTimes(split_times | ({} if split else {"unsplit ": [8.0]}), None)] * 2
    costs = costs_of_stages(stages, "flat", p2p=None if split else 0.25)
    assert (costs.F, costs.I, costs.W) == ((3, 3), (5, 5), (2, 2))
    assert (costs.B is None) if split else (costs.B == (8, 8))
    text = dump_costs(costs)
    keys = [line.partition(" = ")[0] for line in text.splitlines()[1:] if line]
    assert keys == ["[ops]", "F", "I", "W", *(() if split else ("B", "p2p"))]
    options = Namespace(repetitions=9, warmup=3, only=None)
    said = "\n".join(calibrate.provenance(costs, options, 1))
    assert ("B is I + W" in said, "B: whole" in said) == (split, not split)
    assert "d2h, h2d: not measured: no device." in said
    assert "d2h 50 GB/s, h2d 40.5 GB/s, pinned" in "\n".join(calibrate.provenance(costs, options, 1, (5e10, 4.05e10)))
    assert ("p2p: not measured" in said, "the median of 15" in said) == (split, not split)
    read = parse_costs(Source("costs.toml", text))
    assert read == costs
    for schedule in ("zbh1", "1f1b"):
        analyse(schedule, {"P": 2, "M": 4}, read)


def test_a_role_has_the_lower_median_of_its_places() -> None:
    """The first attention holds the embedding, the last post the head, and a middle attention another layer's end."""
    shape = stage_shape(["moe", "moe"], "flat", True, nodes=1)
    base = dict.fromkeys(shape.names, 1.0) | {"0.attention": 5.0, "1.attention": 7.0, "1.post": 2.0}
    stages = []
    for extra in (10.0, 0.0, 0.5):
        samples = {f"forward {name}": [time, time + 1, time + 1000] for name, time in base.items()}
        samples["forward 0.attention"] = [5.0 + extra] * 3
        stages.append(StageTimes({**samples, "weight 0.experts": [4.0, 4.0, 4.0]}, shape))
    costs = costs_of_stages(stages, "flat", p2p=0.25)
    assert costs.cell is not None
    segments = dict(costs.cell.costs.segments)
    assert segments["attention"] == SegmentTimes(5.5)
    assert segments["post"] == SegmentTimes(3.0)
    assert segments["experts"] == SegmentTimes(2.0, 0.0, 4.0)
    assert dict(costs.cell.costs.exchanges)["dispatch.node"] == SegmentTimes(2.0)
    assert costs.p2p == 0.25
    assert merged([[{"a": [1.0]}], [{"a": [2.0], "b": [3.0]}]]) == [{"a": [1.0, 2.0], "b": [3.0]}]


def test_slices_are_timed_against_the_whole() -> None:
    """Two slices of 6 in place of 10, exchanges of 2 in place of 4; and a model without exchanges."""
    whole = CellCosts.of({"dense": SegmentTimes(4, 4, 2)}, {"dispatch.node": 2.0})
    part = CellCosts.of({"dense": SegmentTimes(2, 2, 2)}, {"dispatch.node": 1.0})
    assert slice_factor(2, whole, part) == (2, 1.2, 1.0)
    assert slice_factor(2, replace(whole, exchanges=()), replace(part, exchanges=())) == (2, 1.2, 1.0)
    batch = {"x": torch.zeros(6, 3), "scale": torch.ones(()), "n": 4}
    assert rows_of_slices(batch) == 6
    cut = first_slice(batch, 6, 3)
    assert (cut["x"].shape, cut["scale"].shape, cut["n"]) == ((2, 3), (), 4)
    assert rows_of_slices([3]) == 0


def test_buckets_of_rows_follow_each_other_and_rows_are_uneven() -> None:
    assert points(1) == [1]
    assert points(8) == [1, 4, 16]
    counts = counts_of(8, 16)
    assert (sum(counts), counts[0], counts[-1]) == (128, 9, 23)
    experts = small_moe(2, 0)
    (family,) = measure_kernels([experts], torch.device("cpu"), lambda layer: 8, counted=False, warmup=1, repetitions=1)
    ends = [(bucket.low, bucket.high) for bucket in family.buckets]
    assert ends == [(1, 1), (2, 7), (8, 31)]
    assert all("padded" not in dict(bucket.times) for bucket in family.buckets)  # only the device knows the rows
    assert all(parameter.grad is None for parameter in experts.parameters())
    assert {layer.experts.products.name for _, layer in moe_layers(experts)} == {"auto"}


@pytest.mark.processes
def test_calibrate_check_run(tmp_path: Path) -> None:
    """What a user does: measure a plan on processes, price it, train with the measured order."""
    plan, costs_file = tmp_path / "small.sched", tmp_path / "made" / "costs.toml"
    plan.write_text(PLAN)
    done = run_schedc(["calibrate", str(plan), "-o", str(costs_file), "--repetitions", "2", "--warmup", "1", *TINY])
    assert done.returncode == 0, done.stderr
    assert costs_file.read_text().startswith("# Milliseconds on ")
    costs = load_costs(costs_file)
    assert costs.cell is not None
    assert costs.cell.blocks == (("dense", "moe"), ("moe",))
    labels = ("routing", "dispatch", "combine", "balance")
    assert {name for name, _ in costs.cell.costs.exchanges} == {f"{label}.node" for label in labels}
    assert costs.p2p > 0
    analysis = analyse(plan, {}, costs)
    assert analysis.inside is not None
    (factor,) = costs.cell.costs.slices
    assert (factor.slices, factor.segments > 0, factor.exchanges > 0) == (2, True, True)
    (family,) = costs.kernels
    assert (family.shape, [x.low for x in family.buckets]) == ((4, 8, 4, "float32", False), [1, 2, 8])
    for bucket in family.buckets:
        times = dict(bucket.times)
        assert bucket.provider == min(times, key=lambda name: times[name])
        assert times.keys() == {"grouped", "loop", "padded"}
    options = ["--cost-file", str(costs_file), "--check", "bitwise", "--steps", "2", "--timeout", "60"]
    done = run_schedc(["run", str(plan), *options, *TINY])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("= all ranks in one process, serial cells, bitwise") == 2
    assert "check passed" in done.stdout


def test_cell_costs_of_a_file_order_cells() -> None:
    """An order follows the file: with nothing but a long routing, the shared expert fills the wait for it."""
    costs = CellCosts.of({"shared": SegmentTimes(5.0)}, {"routing.node": 5.0, "sizes.host": 1.0})
    loaded = parse_costs(Source("costs.toml", dump_costs(Costs(cell=CellTable(costs))))).cell
    assert loaded is not None
    program = schedc.compile("1f1b", P=1, M=2)
    plan = schedc.plan.Plan(overlap=True)
    pipe = Pipeline(small_moe(2, 0), program, loss_fn=next_token_loss, plan=plan, cells=loaded.costs)
    names = pipe.held(pipe.places[0])[0].shape.names
    steps = [f"{step.action} {names[step.node]}" for step in pipe._assembly.cells["F of 0"].program.steps]
    start, filler, wait = (steps.index(x) for x in ("start 0.routing.node", "run 0.shared", "wait 0.routing.node"))
    assert start < filler < wait
    assert "wait 0.sizes.host" in steps
    assert [asks_on_lane(plan, None, torch.device(name)) for name in ("cpu", "cuda")] == [False, True]
    assert not asks_on_lane(plan, serial, torch.device("cuda"))


def test_a_model_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ModuleType("mine")
    mine.model = lambda: (small_moe(2, 0), next_token_loss, *tokens(2))  # type: ignore[attr-defined]
    mine.wrong = lambda: small_moe(2, 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    path = tmp_path / "program.json"
    path.write_text(program_to_json(schedc.compile("1f1b", P=1, M=2)))
    arguments = ["--program", str(path), "--repetitions", "1", "--warmup", "1", "--model"]
    assert calibrate.main([*arguments, "mine:model"]) == 0
    assert 'stages = "moe*2"' in capsys.readouterr().out
    for name, said in [
        ("mine:wrong", "no function that gives"),
        ("mine:none", "no attribute"),
        ("nowhere:f", "nowhere"),
    ]:
        assert calibrate.main([*arguments, name]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        calibrate.main(["--program", str(tmp_path / "none.json")])
    assert usage.value.code == 2


@pytest.mark.slow
def test_only_some_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has nothing but the times that were asked for, and the parts beside them were not timed."""
    timed: list[str] = []
    whole = Bench._timed
    monkeypatch.setattr(
        Bench, "_timed", lambda self, half, name, *run: timed.append(name) or whole(self, half, name, *run)
    )
    path = tmp_path / "program.json"
    path.write_text(program_to_json(schedc.compile("1f1b", P=1, M=2)))
    arguments = ["--program", str(path), "--repetitions", "1", "--warmup", "1", *TINY]
    assert calibrate.main([*arguments, "--toy", "moe", "--only", "experts"]) == 0
    text = capsys.readouterr().out
    keys = [line.partition(" = ")[0] for line in text.splitlines() if line and line[0] != "#"]
    assert keys == ["schema", "[cell]", "stages", "method", "experts", "permute", "post", "shared"]
    assert {name.partition(".")[2] for name in timed if "." in name} == {"experts", "permute", "post", "shared"}
    assert parse_costs(Source("costs.toml", text)).cell is not None
    assert "a schedule cannot be priced by this file" in text
    assert calibrate.main([*arguments, "--toy", "gpt", "--only", "launch"]) == 0
    keys = [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines() if line and line[0] != "#"]
    assert keys == ["schema", "[ops]", "F", "I", "W"]
    for toy, only in (("gpt", "experts"), ("gpt", "exchange"), ("moe", "exchange"), ("moe", "launch"), ("gpt", "sums")):
        assert calibrate.main([*arguments, "--toy", toy, "--only", only]) == 1
        assert f"`--only {only}` finds nothing to measure" in capsys.readouterr().err


def test_half_a_sum_of_a_gigabyte() -> None:
    """Every size takes 1 ms and 0.5 s for each GB, on the slower rank in the median run: the start is no part of it."""
    times = [1e-3 + 0.5e-9 * mega * 2**20 for mega in SUMMED_MEGABYTES]
    fast, slow = [[0.5 * time, time, 0.1 * time] for time in times], [[time, 0.9 * time, 9 * time] for time in times]
    assert per_gigabyte([fast, slow]) == pytest.approx(500.0, rel=1e-9)


def test_both_halves_of_a_sum_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 2 s with each collective: their mean is 2 s for each counted run of each size."""
    calls: list[str] = []

    class Clocked(SoloCommunicator):
        def wait(self, handle: Any) -> Any:
            calls.append("wait")
            return super().wait(handle)

    monkeypatch.setattr("schedc_runtime.measure.sum_times.time.perf_counter", lambda: 2.0 * len(calls))
    assert time_halves(Clocked("group"), torch.device("cpu"), 1, 2) == [[2.0, 2.0]] * len(SUMMED_MEGABYTES)
    assert len(calls) == 3 * 3 * len(SUMMED_MEGABYTES)


@pytest.mark.slow
@pytest.mark.processes
def test_sums_of_two_ranks_are_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "sums.toml"
    size, few = ("-D", "P=1", "-D", "M=1"), ("--repetitions", "1", "--warmup", "1")
    done = run_schedc(["calibrate", "1f1b", *size, "--only", "sums", "--processes", "2", *few, "-o", str(path)])
    assert done.returncode == 0, done.stderr
    costs = load_costs(path)
    assert costs.given == {"dp"}
    assert 1 < costs.dp < 1e6
    assert "CPU: 2 ranks, no model." in path.read_text()


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(schedc_main, ["calibrate", "1f1b", "--toy", "gpt", "--model", "a:b"])
    assert result.exit_code == 2
    path = tmp_path / "program.json"
    plan = tmp_path / "large.sched"
    plan.write_text(PLAN.replace("1 x 2", "64 x 8").replace("experts 8", "experts 512"))
    path.write_text(program_to_json(schedc.compile(plan)))
    assert run.main(["--program", str(path)]) == 1
    assert "ask for 512 processes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["--program", str(path), "--topology", "2"])


@needs("transformers")
def test_what_one_process_does_not_run_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any process is started for a plan; where the model is known for segments of its sequences."""
    mine, (file, text) = (
        ModuleType("mine"),
        (tmp_path / "program.json", "plan a = 1f1b(P = 2, M = 2) {{ layers 2  {} }}"),
    )
    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    mine.model = lambda: (family("llama", num_hidden_layers=2), next_token_loss, inputs, torch.zeros(2, 8))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    for line, said in (
        ("parallel tp 2 cp 1 ep 1 dp 1", "the plan says tp 2, and calibrate measures whole layers on one process"),
        ("parallel tp 1 cp 2 ep 1 dp 1", "the plan says cp 2, and calibrate measures whole layers on one process"),
    ):
        file.write_text(program_to_json(schedc.compile(Text(Source("a.sched", text.format(line))))))
        assert calibrate.main(["--program", str(file)]) == 1
        assert said in capsys.readouterr().err
    file.write_text(program_to_json(schedc.compile("seq1f1b", P=1, M=2, k=4)))
    assert calibrate.main(["--program", str(file), "--model", "mine:model"]) == 1
    assert "sequences in 4 segments, and calibrate measures whole ones" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_say_the_same_error_once(tmp_path: Path) -> None:
    plan = tmp_path / "sliced.sched"
    lines = "layers 2\n  experts 4 top 2 width 16 hidden 64\n  overlap auto\n  slices 3"
    plan.write_text(f"sched 1\n\nplan sliced = 1f1b_overlap(P = 2, M = 2) {{\n  {lines}\n}}\n", encoding="utf-8")
    done = run_schedc(["run", str(plan), "--steps", "1"])
    assert (done.returncode, done.stderr.count("which do not divide into the 3 slices of stage 0")) == (1, 1)
