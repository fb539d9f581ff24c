"""Traces, measured costs, and the command that runs a program: on one process and on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from runtime_cases import next_token_loss, small_gpt, tokens

import schedc
from schedc.analysis.timeline import simulate
from schedc.cost.costs import Costs, dump_costs, load_costs
from schedc.ir.npz import program_to_npz
from schedc.ir.program import InstructionKind, Program, computation
from schedc_runtime import Pipeline, run
from schedc_runtime.executor import Interval
from schedc_runtime.names import label
from schedc_runtime.trace import chrome_trace, compare, measured_costs


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
    result = compare(program, measured, intervals)
    assert result.measured == pytest.approx(simulate(computation(program)[0], costs).makespan)
    if schedule in ("1f1b", "zbv"):  # in the others some stages run a kind only inside pairs
        assert result.predicted == pytest.approx(result.measured)
        assert result.predicted_busy == pytest.approx(result.measured_busy)
        assert f"{result.predicted:.2f} ms" in result.table().splitlines()[-1]
    path = tmp_path / "measured.toml"
    path.write_text(dump_costs(measured))
    assert simulate(computation(program)[0], load_costs(path)).makespan == pytest.approx(result.predicted)


def test_standing_for_a_message_inside_a_cell_is_no_time_of_the_cell() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    kinds = program.kind[program.rank_start[1] :].tolist()
    waits, runs = (int(program.rank_start[1]) + kinds.index(kind) for kind in (InstructionKind.WAIT, InstructionKind.F))
    spans = [(waits, 0, 9), (runs, 9, 12), (waits, 12, 20), (runs, 20, 24), (waits, 24, 30)]
    intervals = {1: [Interval(row, 1, start * 10**6, end * 10**6) for row, start, end in spans]}
    assert measured_costs(program, [intervals]).F == (7, 7)


def test_a_trace_has_every_instruction_once_and_its_messages() -> None:
    program = schedc.compile("dualpipev", P=4, M=8)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True)
    pipe.step(*tokens(8), trace=True)
    intervals = pipe.trace()
    seen = [row for spans in intervals.values() for x in spans for row in range(x.row, x.row + x.rows)]
    assert seen == list(range(len(program)))
    assert all(a.end <= b.start for spans in intervals.values() for a, b in pairwise(spans))
    events = json.loads(json.dumps(chrome_trace(program, intervals)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    computed = [e for e in slices if e["tid"] == 0]
    kinds = program.kind <= InstructionKind.CELL
    assert sorted(e["name"] for e in computed) == sorted(label(program, r) for r in range(len(program)) if kinds[r])
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    assert all(e["args"]["source"].startswith("dualpipev.sched:") and e["args"]["phase"] for e in computed)
    arrows = [sorted(e["id"] for e in events if e["ph"] == end) for end in "sf"]
    assert arrows[0] == arrows[1] == sorted(set(program.message[program.kind == InstructionKind.SEND].tolist()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert pipe.step(*tokens(8)).isfinite(), "tracing is for one step"


def write(program: Program, folder: Path) -> str:
    path = folder / "program.npz"
    path.write_bytes(program_to_npz(program))
    return str(path)


def test_run_on_processes(tmp_path: Path) -> None:
    path = write(schedc.compile("dualpipev", P=2, M=4), tmp_path)
    trace = tmp_path / "trace.json"
    options = ["--check", "bitwise", "--steps", "2", "--width", "16", "--tokens", "4", "--trace", str(trace)]
    command = [sys.executable, "-m", "schedc_runtime.run", "--program", path, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert "check passed: loss and gradients of 2 steps, all ranks" in done.stdout
    assert "makespan" in done.stdout
    assert json.loads(trace.read_text())["otherData"]["schedule"] == "dualpipev"
    assert isinstance(load_costs(tmp_path / "trace.costs.toml").F, tuple)


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
