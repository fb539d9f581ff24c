"""Traces, measured costs, and the command that runs a program: on one process and on real ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import schedc
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnose.open_traces import open_traces
from schedc.diagnostics import DiagnosticError
from schedc.interchange.run_trace import measured_run, read_run
from schedc.ir.npz import program_to_npz
from schedc.ir.program import InstructionKind, Program, computation
from schedc.step.costs.costs import Costs, dump_costs, load_costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate
from schedc_runtime import Pipeline
from schedc_runtime.commands import run
from schedc_runtime.execute.executor import Interval
from schedc_runtime.execute.instruction_names import instruction_label
from schedc_runtime.measure.step_trace import Intervals, chrome_trace, compare_traces, measured_costs, trace_provenance
from support.offloads import offloaded
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import in_sweeps
from support.warm_command import run_python


def as_measured(program: Program, costs: Costs) -> dict[int, list[Interval]]:
    """Intervals of the compute instructions that take exactly what ``costs`` (in ms) say."""
    schedule, row_of_op = computation(program)
    timeline = simulate(schedule, costs)
    intervals: dict[int, list[Interval]] = {rank: [] for rank in range(program.ranks)}
    first_op = [int(row) for row in dict.fromkeys(row_of_op.tolist())]
    for cell, row in enumerate(first_op):
        start, end = (int(1e6 * t[cell]) for t in (timeline.start, timeline.end))
        intervals[int(program.rank[row])].append(Interval(row, 1, start, end))
    return intervals


def test_works_have_tracks_of_their_lanes() -> None:
    step = offloaded()
    program = step.program()
    costs = Costs(F=2.0, I=3.0, W=1.0, B=4.0, FB=5.0)
    intervals = as_measured(program, costs)
    for rank, spans in intervals.items():
        for row in np.flatnonzero((program.rank == rank) & (program.work >= 0)).tolist():
            end = next((span.start for span in spans if span.row > row), spans[-1].end)
            spans.append(Interval(row, 1, end, end))
        spans.sort(key=lambda span: span.row)
    trace = chrome_trace(program, intervals)
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    of_works = [e for e in events if e["ph"] == "X" and e["name"].split("_")[0][1:] in ("START", "JOIN")]
    assert len(of_works) == 2 * len(program.works)
    for event in of_works:
        lane = "d2h" if "OFFLOAD" in event["name"] else "h2d"
        assert names[event["pid"], event["tid"]] == f"lane {lane}"
    assert (2.0,) * program.stages == measured_costs(program, [intervals]).F
    timeline = simulate(computation(program)[0], costs)
    assert compare_traces(program, costs, intervals).measured == pytest.approx(timeline.makespan)
    run = measured_run(read_run(json.dumps(trace), "run.json"), step.dependencies)
    np.testing.assert_allclose(run.start, timeline.start)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_diagnosis_finds_the_schedule_that_a_traced_step_ran(schedule: str, tmp_path: Path) -> None:
    program = schedc.compile(schedule, P=2, M=4)
    batch, targets = tokens(4)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True, example=batch)
    pipe.step(batch, targets, trace=True)
    (tmp_path / "run.json").write_text(json.dumps(chrome_trace(program, pipe.intervals)), encoding="utf-8")
    found, ran = open_traces([tmp_path / "run.json"]).dependencies.schedule, computation(program)[0]
    for column in ("rank_start", "kind", "stage", "microbatch"):
        np.testing.assert_array_equal(getattr(found, column), getattr(ran, column))
    np.testing.assert_array_equal(found.pair >= 0, ran.pair >= 0)


def test_pieces_of_a_snapshot_are_copies_in_the_trace_of_their_step(tmp_path: Path) -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    batch, targets = tokens(4)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True, example=batch)
    pipe.step(batch, targets, snapshot=True, trace=True)
    assert pipe._runner.traced is pipe.snapshot().program
    (tmp_path / "run.json").write_text(json.dumps(chrome_trace(pipe._runner.traced, pipe.intervals)))
    replay = open_traces([tmp_path / "run.json"])
    assert len(replay.dependencies) == len(computation(program)[0].kind)
    assert (replay.parts.snapshots[0, 0] > 0).sum() > 2, "pieces in front of cells"
    assert not replay.parts.offloads.any()
    pipe.step(batch, targets, trace=True)
    assert pipe._runner.traced is program


def test_what_interrupted_an_instruction_is_in_its_trace(tmp_path: Path) -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    intervals = as_measured(program, Costs(F=2.0, B=4.0))
    first = intervals[1][0]
    intervals[1][0] = first._replace(off_core=700_000, collecting=300_000)
    (tmp_path / "run.json").write_text(json.dumps(chrome_trace(program, intervals, as_measured(program, Costs()))))
    parts = open_traces([tmp_path / "run.json"]).parts
    cell = 4  # of rank 1 the first
    assert (parts.off_core[0, cell], parts.collecting[0, cell], parts.body[0, cell]) == pytest.approx((0.7, 0.3, 1.0))
    assert parts.off_core.sum() == pytest.approx(0.7)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "dualpipe"])
def test_costs_measured_on_a_simulated_step_predict_it(schedule: str, tmp_path: Path) -> None:
    program = schedc.compile(schedule, P=4, M=8)
    stages = range(program.stages)
    costs = Costs(
        F=tuple(2.0 + s for s in stages), I=tuple(3.0 + s for s in stages), W=tuple(1.0 + s for s in stages),
        B=tuple(4.0 + 2 * s for s in stages), FB=tuple(20.0 + s for s in stages),
    )  # fmt: skip
    intervals = as_measured(program, costs)
    measured = measured_costs(program, [intervals])
    result = compare_traces(program, measured, intervals)
    assert result.measured == pytest.approx(simulate(computation(program)[0], costs).makespan)
    if schedule in ("1f1b", "zbv"):  # in the others some stages run a kind only inside pairs
        assert result.predicted == pytest.approx(result.measured)
        assert result.predicted_busy == pytest.approx(result.measured_busy)
        rows = result.table().splitlines()
        assert rows[1].split()[:4] == ["rank", "0", "computes", f"{result.predicted_busy[0]:.2f}"]
        assert f"{result.predicted:.2f} ms" in rows[-1]
    path = tmp_path / "measured.toml"
    path.write_text(dump_costs(measured))
    assert simulate(computation(program)[0], load_costs(path)).makespan == pytest.approx(result.predicted)


def test_what_did_not_run_by_itself_is_not_given(tmp_path: Path) -> None:
    """1F1B has no I and no W; late ZB-H1 splits on some stages only, and the others get the median of these."""
    for schedule, kinds in (("1f1b", "FB"), ("zbh1_late", "FIWB")):
        program = schedc.compile(schedule, P=4, M=8)
        intervals = as_measured(program, Costs(F=2.0, I=3.0, W=1.0, B=5.0))
        costs = measured_costs(program, [intervals])
        assert costs.given == frozenset(kinds), "no message was timed"
        path = tmp_path / "measured.toml"
        path.write_text("".join(f"# {line}\n" for line in trace_provenance(program, [intervals])) + dump_costs(costs))
        keys = [line.partition(" = ")[0] for line in path.read_text().splitlines() if " = [" in line]
        assert sorted(keys) == sorted(kinds)
        analyse(schedule, {"P": 4, "M": 8}, load_costs(path))
    without = sorted({*range(4)} - {*program.stage[program.kind == InstructionKind.I].tolist()})
    assert without
    assert f"I of stage{'s' * (len(without) > 1)} {', '.join(map(str, without))}: the median of" in path.read_text()


def test_standing_for_a_message_inside_a_cell_is_no_time_of_the_cell() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    kinds = program.kind[program.rank_start[1] :].tolist()
    waits, runs = (int(program.rank_start[1]) + kinds.index(kind) for kind in (InstructionKind.WAIT, InstructionKind.F))
    spans = [(waits, 0, 9), (runs, 9, 12), (waits, 12, 20), (runs, 20, 24), (waits, 24, 30)]
    intervals = {1: [Interval(row, 1, start * 10**6, end * 10**6) for row, start, end in spans]}
    assert measured_costs(program, [intervals]).F == (7, 7)


def test_a_trace_has_every_instruction_once_and_its_messages() -> None:
    program = schedc.compile("dualpipev", P=4, M=8)
    pipe = Pipeline(small_gpt(8), program, loss_fn=next_token_loss, in_process=True)
    pipe.step(*tokens(8), trace=True)
    intervals = pipe.trace()
    seen = [row for spans in intervals.values() for x in spans for row in range(x.row, x.row + x.rows)]
    assert seen == list(range(len(program)))
    assert all(a.end <= b.start for spans in intervals.values() for a, b in pairwise(spans))
    events = json.loads(json.dumps(chrome_trace(program, intervals)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    computed = [e for e in slices if e["tid"] == 0]
    kinds = program.kind <= InstructionKind.CELL
    assert sorted(e["name"] for e in computed) == sorted(
        instruction_label(program, r) for r in range(len(program)) if kinds[r]
    )
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    assert all(e["args"]["source"].startswith("dualpipev.sched:") and e["args"]["phase"] for e in computed)
    arrows = [sorted(e["id"] for e in events if e["ph"] == end) for end in "sf"]
    assert arrows[0] == arrows[1] == sorted(set(program.message[program.kind == InstructionKind.SEND].tolist()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert pipe.step(*tokens(8)).isfinite(), "tracing is for one step"


UNEVEN = Costs(F=1.5, I=(2.0, 1.0, 3.0, 2.5, 2.0, 1.0, 3.0, 2.5), W=0.5, p2p=0.25)


def in_steps(intervals: Intervals) -> dict[int, list[Interval]]:
    """The intervals with each instruction in two micro-steps and a pause between them."""
    return {
        rank: [
            x._replace(start=low, end=high, part=part)
            for x in spans
            for low, high, part in (
                (x.start, x.start + (x.end - x.start) // 3, "begin"),
                (x.start + (x.end - x.start) // 2, x.end, "run forward of 0.experts"),
            )
        ]
        for rank, spans in intervals.items()
    }


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("parts", [dict, in_steps], ids=["whole", "in steps"])
def test_a_trace_is_read_back_cell_by_cell(schedule: str, parts: Callable[[Intervals], Intervals]) -> None:
    program = schedc.compile(schedule, P=4, M=8)
    computed, _ = computation(program)
    dependencies = Dependencies.of(computed)
    predicted = simulate(computed, UNEVEN, dependencies)
    trace = chrome_trace(program, parts(as_measured(program, UNEVEN)))
    run = read_run(json.dumps(trace), "run.json")
    assert (run.schedule, run.sizes) == (schedule, {"P": 4, "M": 8})
    timeline = measured_run(run, dependencies)
    np.testing.assert_allclose(timeline.start, predicted.start, atol=1e-5)
    np.testing.assert_allclose(timeline.end, predicted.end, atol=1e-5)
    assert timeline.busy == pytest.approx(predicted.busy, abs=1e-4)


Events = list[dict[str, Any]]


def named(events: Events, name: str) -> dict[str, Any]:
    return next(event for event in events if event.get("name") == name)


def swapped(events: Events) -> None:
    first, second = named(events, "0F1"), named(events, "0F2")
    first["ts"], second["ts"] = second["ts"], first["ts"]


MISFITS: list[tuple[Callable[[Events], Any], str]] = [
    (lambda events: events.remove(named(events, "1F3")), "rank 1 did not run 1F3"),
    (lambda events: named(events, "1F3").update(name="1F9"), "rank 1 ran 1F9; the schedule has no 1F9 there"),
    (lambda events: named(events, "1F3").update(name="1F99999999"), "the schedule has no 1F99999999 there"),
    (lambda events: named(events, "1F3").update(pid=0), "rank 0 ran 1F3; the schedule has no 1F3 there"),
    (lambda events: named(events, "1F3").update(pid=5), "the run had 6 ranks, the schedule has 2"),
    (lambda events: named(events, "1F3").update(name="(1F3;1B0)OVERLAP_F_B"), "ran 1F3 & 1B0; the schedule has 1F3"),
    (lambda events: events.append(named(events, "1F3")), "rank 1 ran 1F3 twice"),
    (swapped, "rank 0 began 0B0 before 0F1 had ended, which comes first in the schedule"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=[message for _, message in MISFITS])
def test_a_trace_of_another_run_is_refused(change: Callable[[Events], Any], message: str) -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    trace = chrome_trace(program, as_measured(program, Costs()))
    change(trace["traceEvents"])
    with pytest.raises(DiagnosticError) as error:
        measured_run(read_run(json.dumps(trace), "run.json"), Dependencies.of(computation(program)[0]))
    (finding,) = error.value.diagnostics
    assert finding.code == "S610"
    assert message in finding.message
    assert finding.notes == ("the trace is of 1f1b (P = 2, M = 4), the drawing of 1f1b (P = 2, M = 4)",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object with a list `traceEvents`"),
        ('{"traceEvents": 1}', "no JSON object with a list `traceEvents`"),
        ('{"traceEvents": [1, {"ph": "X", "name": "0SEND_F1"}]}', "no slice is named like an op"),
        ('{"traceEvents": [{"ph": "X", "name": "0F1", "ts": NaN, "dur": 1, "pid": 0}]}', "event 0 (0F1) has no times"),
        ('{"traceEvents": [{"ph": "X", "name": "0F1", "ts": 1, "dur": -1, "pid": 0}]}', "event 0 (0F1) has no times"),
        ('{"traceEvents": [{"ph": "X", "name": "0F1", "ts": 1, "dur": "2", "pid": 0}]}', "event 0 (0F1) has no times"),
        ('{"traceEvents": [{"ph": "X", "name": "0F1", "ts": 1, "dur": 1, "pid": "0"}]}', "event 0 (0F1) has no rank"),
        ('{"traceEvents": [], "otherData": {"unit": "1 ms is 1 unit of cost"}}', "a predicted timeline"),
    ],
)
def test_what_is_no_trace_of_a_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(DiagnosticError, match=re.escape(message)) as error:
        read_run(text, "run.json")
    assert [d.code for d in error.value.diagnostics] == ["S611"]


def test_show_draws_a_run_above_its_prediction(tmp_path: Path) -> None:
    program = schedc.compile("1f1b", P=2, M=3)
    trace, page = tmp_path / "run.json", tmp_path / "page.html"
    trace.write_text(json.dumps(chrome_trace(program, as_measured(program, Costs(F=2.0)))))

    def show(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["show", "1f1b", "--trace", str(trace), "-o", str(page), *options])
        return result.exit_code, result.output

    assert show()[0] == 2
    assert "--trace needs --cost-file or --cost, in milliseconds" in show()[1]
    (tmp_path / "run.costs.toml").write_text(dump_costs(Costs(F=1.75)))
    for options, costs in ((), "run.costs.toml, in ms"), (("--cost", "F=3"), "--cost, in ms"):
        assert show(*options) == (0, f"wrote {page}\n")
        text = page.read_text()
        assert '"1f1b (P = 2, M = 3), measured"' in text
        assert '"1f1b (P = 2, M = 3), predicted"' in text
        assert '["trace","run.json"]' in text
        assert f'["costs","{costs}"]' in text
    status, said = show("-D", "M=4")
    assert status == 1
    assert "error[S610]" in said
    assert "the trace is of 1f1b (P = 2, M = 3), the drawing of 1f1b (P = 2, M = 4)" in said
    for wrong in (["--format", "svg"], ["--with", "zbh1"], ["--cell", "F"]):
        assert show(*wrong)[0] == 2


def write(program: Program, folder: Path) -> str:
    path = folder / "program.npz"
    path.write_bytes(program_to_npz(program))
    return str(path)


@in_sweeps(
    "test_a_trace_has_every_instruction_once_and_its_messages",
    "project/test_docs.py::test_a_page_that_trains_shows_what_its_commands_print",
)
@pytest.mark.processes
def test_run_on_processes(tmp_path: Path) -> None:
    path = write(schedc.compile("dualpipev", P=2, M=4), tmp_path)
    trace = tmp_path / "trace.json"
    options = ["--check", "bitwise", "--steps", "2", "--width", "16", "--tokens", "4", "--trace", str(trace)]
    options += ["--trace-steps", "2"]
    done = run_python(["-m", "schedc_runtime.commands.run", "--program", path, *options])
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert "check passed: loss and gradients of 2 steps, all ranks" in done.stdout
    assert "makespan" in done.stdout
    assert json.loads(trace.read_text())["otherData"]["schedule"] == "dualpipev"
    assert isinstance(load_costs(tmp_path / "trace.costs.toml").F, tuple)
    replay = open_traces([trace])
    assert replay.steps.makespan.size == 2
    assert np.abs(replay.residual).max() < 1e-6
    page = tmp_path / "run.html"
    shown = CliRunner().invoke(main, ["show", "dualpipev", "--trace", str(trace), "-o", str(page)])
    assert (shown.exit_code, page.exists()) == (0, True), shown.output


@pytest.mark.slow
def test_run_reports_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as usage:
        run.main(["--program", str(tmp_path / "none.json")])
    assert usage.value.code == 2
    assert "cannot read the program" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert run.main(["--program", str(broken)]) == 1
    with pytest.raises(SystemExit) as usage:
        run.main(["--program", str(broken), "--steps", "0"])
    assert usage.value.code == 2
    path = write(schedc.compile("1f1b", P=2, M=2), tmp_path)
    assert run.main(["--program", path, "--in-process", "--steps", "1", "--width", "8", "--check", "bitwise"]) == 0
    assert "= reference, bitwise" in capsys.readouterr().out
