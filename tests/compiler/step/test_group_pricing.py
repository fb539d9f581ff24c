"""Ranks of an expert group with different rows: priced in step, and the table ``[cell.rows]`` that says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import CellCosts, SegmentTimes, StageShape, cell_program, stage_shape
from schedc.cell.group import GroupTasks, task_times
from schedc.cell.issue_order import ExpertRanks
from schedc.cell.program import KINDS
from schedc.cell.simulate import ArrivalTimes, play
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.ir.arrays import Floats
from schedc.source import Source
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.cells.lone_cells import play_ranks
from schedc.step.costs.costs import Costs, dump_costs, load_costs, parse_costs
from support.cell_cases import graphs, reference_costs, shapes_of
from support.lone_cells import play_alone
from support.short_search import short_search
from support.sweeps import in_sweeps, swept

CELLS = (Path(__file__).parents[3] / "examples" / "costs" / "cells.toml").read_text()
TIMES = st.integers(0, 9).map(float)


def costs_with(rows: str, folder: Path | None = None, cells: str = CELLS) -> Costs:
    return parse_costs(Source(str((folder or Path()) / "costs.toml"), f"{cells}\n[cell.rows]\n{rows}\n"))


def priced(rows: str, name: str = "dualpipev", P: int = 2, M: int = 6, folder: Path | None = None) -> CellPricing:
    inside = analyse(name, {"P": P, "M": M}, costs_with(rows, folder)).inside
    assert inside is not None
    return inside


def even(name: str = "dualpipev", P: int = 2, M: int = 6) -> CellPricing:
    inside = analyse(name, {"P": P, "M": M}, parse_costs(Source("costs.toml", CELLS))).inside
    assert inside is not None
    return inside


# One cell.


def factors(*ranks: float) -> Floats:
    return np.array(ranks).reshape(1, 1, -1)


@pytest.mark.sweep
@settings(max_examples=swept(60, 8))
@given(st.data(), st.sampled_from(KINDS), graphs(), graphs())
def test_ranks_with_equal_rows_take_what_one_takes(
    data: st.DataObject, kind: str, forward: StageShape, backward: StageShape
) -> None:
    shapes = shapes_of(kind, forward, backward)
    segments = {role: SegmentTimes(*data.draw(st.tuples(TIMES, TIMES, TIMES))) for role in ("attention", "experts")}
    costs = CellCosts.of(segments, {"dispatch.rail": data.draw(TIMES), "attention.node": data.draw(TIMES)})
    program = cell_program(kind, *shapes, costs)
    times = data.draw(st.tuples(TIMES, TIMES, TIMES))
    alone = play(program, *shapes, costs, arrivals=ArrivalTimes(*times))
    tasks = GroupTasks.of(program, *shapes, costs)
    arrivals = np.broadcast_to(np.array(times)[:, None], (3, 3))
    played = play_alone(tasks, task_times(tasks, factors(1, 1, 1), factors(1, 1, 1)), arrivals)
    outs = [alone.duration if x is None else x for x in (alone.duration, alone.activation_at, alone.gradient_at)]
    assert (played.outs == np.array(outs)[:, None]).all()
    assert not played.waiting.any()
    assert np.allclose(played.exposed.sum(axis=0), sum(span.time for span in alone.waits))


def one_forward(*rows: float, ranks: ExpertRanks | None = None, method: str = "flat") -> tuple[Floats, Floats, Floats]:
    """[ranks] end, exposed and waiting time of an F of one MoE layer: 20, dispatch 12, experts 20, combine 12, 2."""
    shape = stage_shape(["moe"], method, shared=False)
    costs = reference_costs(12)
    tasks = GroupTasks.of(cell_program("F", shape, None, costs), shape, None, costs, ranks)
    played = play_alone(tasks, task_times(tasks, factors(*rows), factors(*rows)), np.zeros((3, len(rows))))
    return played.outs[0], played.exposed.sum(axis=0), played.waiting.sum(axis=0)


def test_the_emptier_rank_waits_for_the_fuller_one_and_then_for_the_link() -> None:
    end, exposed, waiting = one_forward(1.5, 0.5)
    # attention 20, dispatch 18, experts 30 and 10, combine 18 from 68 on both, post 2
    assert end.tolist() == [88, 88]
    assert exposed.tolist() == [36, 36]
    assert waiting.tolist() == [0, 20]


def test_ranks_wait_within_their_communicators_alone() -> None:
    """Four ranks, two in each of two nodes. Rows take the rail between ranks 0 and 2, 1 and 3; nodes carry nothing."""
    _, _, waiting = one_forward(2.0, 1.0, 1.0, 1.0, ranks=ExpertRanks(2, 2), method="hierarchical")
    together = one_forward(2.0, 1.0, 1.0, 1.0, method="hierarchical")[2]
    assert together.tolist() == [0, 20, 20, 20]
    assert waiting[0] == 0
    assert waiting[1] > 0
    assert waiting[2] > 0


@settings(max_examples=40)
@given(st.sampled_from(KINDS), graphs(), graphs(), st.tuples(TIMES, TIMES, TIMES))
def test_spans_of_a_rank_are_its_sums(
    kind: str, forward: StageShape, backward: StageShape, rows: tuple[float, ...]
) -> None:
    shapes = shapes_of(kind, forward, backward)
    costs = CellCosts.of({"experts": SegmentTimes(3, 4, 5), "attention": SegmentTimes(2, 2, 1)}, {"dispatch.rail": 6})
    tasks = GroupTasks.of(cell_program(kind, *shapes, costs), *shapes, costs)
    played = play_alone(tasks, task_times(tasks, factors(*rows), factors(*rows)), np.zeros((3, 3)))
    for rank, alone in enumerate(play_ranks(tasks, factors(*rows))):
        assert alone.duration == played.outs[0, rank]
        assert np.isclose(sum(span.time for span in alone.waits), played.exposed[:, rank].sum())
        assert np.isclose(sum(span.time for span in alone.standing), played.waiting[:, rank].sum())
        computed = sum(span.time for span in alone.spans if not span.task.exchange)
        assert np.isclose(computed, played.compute[rank])


# A schedule.


@pytest.mark.parametrize("name", ["dualpipev", "zbh1", "interleaved_overlap"])
def test_factors_of_one_change_nothing(name: str) -> None:
    without, alike = even(name), priced("per_rank = [1.0, 1.0, 1.0]", name)
    for timeline in ("serial", "overlapped", "early_send", "late_wait"):
        expected, timed = getattr(without, timeline), getattr(alike, timeline)
        assert np.allclose(expected.end, timed.end)
        assert np.allclose(expected.start, timed.start)
    assert (alike.floor, alike.lanes) == (without.floor, without.lanes)
    assert alike.communication() == without.communication()
    assert alike.hidden_steady == without.hidden_steady


def test_imbalance_lies_between_even_rows_and_the_fullest_everywhere() -> None:
    lone = priced("imbalance = 1.4")
    both = priced("per_rank = [1.4, 1.4]")
    assert even().late_wait.makespan < lone.late_wait.makespan <= both.late_wait.makespan
    assert lone.floor <= lone.late_wait.makespan <= lone.serial.makespan
    assert lone.group is not None
    assert both.group is not None
    assert lone.group.by_rank["waiting"][1] > 0 == both.group.by_rank["waiting"].sum()


def test_what_stands_still_is_waiting_exposed_or_idle() -> None:
    pricing = priced("per_rank = [1.5, 0.5]")
    assert pricing.group is not None
    spent = pricing.group.by_rank
    last = pricing.group.rank
    busy = spent["compute"][last] + spent["exposed"][last] + spent["waiting"][last]
    assert np.isclose(busy, pricing.late_wait.busy.sum())
    assert np.isclose(busy + pricing.late_wait.bubble.sum(), pricing.late_wait.makespan * 2)


def test_the_step_is_that_of_the_rank_that_ends_last() -> None:
    """Weight gradients behind the last exchange take each rank the time of its own rows."""
    for rows in ("[0.7, 1.5, 0.8]", "[1.5, 0.5]"):
        pricing = priced(f"per_rank = {rows}", "zbh1")
        assert pricing.group is not None
        ends = pricing.group.ends
        assert ends.min() < ends.max() == ends[pricing.group.rank] == pricing.late_wait.makespan
        assert pricing.late_wait.end.max() == ends.max()


def recorded(folder: Path, rows: object, **header: object) -> str:
    (folder / "routing.json").write_text(json.dumps({"schema": "schedc.routing/1", "rows": rows} | header))
    return 'recorded = "routing.json"'


def test_a_recording_of_constant_rows_is_a_factor_per_rank(tmp_path: Path) -> None:
    """16 layers on 4 stages, 6 microbatches; the first step is another one."""
    rows = np.full((2, 16, 6, 2), [30, 10])
    rows[0] = 77
    by_file = priced(recorded(tmp_path, rows.tolist()), folder=tmp_path)
    assert np.allclose(by_file.late_wait.end, priced("per_rank = [1.5, 0.5]").late_wait.end)


def test_recorded_rows_belong_to_their_layer_and_microbatch(tmp_path: Path) -> None:
    """A full rank in one layer of one microbatch delays what that microbatch runs there, forward and backward."""
    rows = np.full((1, 16, 6, 2), 20)
    rows[0, 5, 3] = [40, 0]
    pricing = priced(recorded(tmp_path, rows.tolist()), "zbh1", 4, folder=tmp_path)
    without = priced(recorded(tmp_path, np.full((1, 16, 6, 2), 20).tolist()), "zbh1", 4, folder=tmp_path)
    assert pricing.group is not None
    assert without.group is not None
    schedule = pricing.late_wait.dependencies.schedule
    changed = np.flatnonzero((pricing.group.compute != without.group.compute).any(axis=1))
    ops = {str(schedule.op(int(pricing.late_wait.dependencies.first[cell]))) for cell in changed}
    assert ops == {"1F3", "1I3", "1W3"}


# The table.


@pytest.mark.parametrize("rows", ["imbalance = 1.3", "per_rank = [1.25, 0.75]"])
def test_tables_of_rows_are_written_back(rows: str) -> None:
    costs = costs_with(rows)
    assert parse_costs(Source("x.toml", dump_costs(costs))).cell == costs.cell


def test_a_recording_is_written_back_by_its_name(tmp_path: Path) -> None:
    costs = costs_with(recorded(tmp_path, [[[[1, 2]]]]), tmp_path)
    (tmp_path / "copy.toml").write_text(dump_costs(costs))
    assert load_costs(tmp_path / "copy.toml").cell == costs.cell


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ("imbalance = 0.9", "S402", 1),
        ("imbalance = nan", "S402", 1),
        ("imbalance = true", "S402", 1),
        ("per_rank = []", "S402", 1),
        ("per_rank = [0.5, 0.75]", "S402", 1),
        ("per_rank = [1.5, -0.5]", "S402", 1),
        ('per_rank = "all"', "S402", 1),
        ("imbalance = 1.5\nper_rank = [1.0]", "S402", 2),
        ("fullest = 2", "S401", 1),
        ('recorded = "nowhere.json"', "S405", 1),
        ("recorded = 3", "S402", 1),
        (f"per_rank = [{'1,' * 10_000_000}]", "S402", 1),
    ],
)
def test_rows_that_are_wrong_are_refused_at_their_place(rows: str, code: str, line: int) -> None:
    with pytest.raises(DiagnosticError) as caught:
        costs_with(rows)
    (finding,) = caught.value.diagnostics
    assert finding.code == code
    assert finding.source is not None
    assert finding.primary.span.line == CELLS.count("\n") + 2 + line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": "schedc.routing/1", "rows": [[[[1, 2', "cut off: Expecting ',' delimiter at line 1, column 48"),
        ("[1, 2]", "no schema"),
        ('{"schema": "schedc.routing/1", "rows": [[[[1, 2], [3]]]]}', "differ in length"),
        ('{"schema": "schedc.routing/1", "rows": [[1, 2]]}', "by step, layer, microbatch and rank"),
        ('{"schema": "schedc.routing/1", "rows": [[[["a"]]]]}', "not numbers"),
        ('{"schema": "schedc.routing/1", "rows": [[[[1, -2]]]]}', "-2.0 rows at [0][0][0][1]"),
        ('{"schema": "schedc.routing/1", "rows": [[[[1, NaN]]]]}', "nan rows at [0][0][0][1]"),
        ("1," * 10_000_000, "20,000,000 bytes"),
    ],
)
def test_recordings_that_are_wrong_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "routing.json").write_text(text)
    with pytest.raises(DiagnosticError) as caught:
        costs_with('recorded = "routing.json"', tmp_path)
    (finding,) = caught.value.diagnostics
    assert finding.code == "S405"
    assert says in finding.message


PLAN = """plan mixed = 1f1b(P = 2, M = 4) {
  layers 2
  experts 64 top 8 groups 8 limit 4 width 1408 hidden 2048
  topology nodes 2 x 2 rail 50 GB/s node 400 GB/s
  tokens 4096 dtype bf16
}
"""


def test_rows_of_another_group_or_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sched"
    file.write_text("sched 1\n" + PLAN)
    for rows in ("per_rank = [1.5, 0.5]", recorded(tmp_path, np.ones((1, 2, 4, 2)).tolist())):
        with pytest.raises(DiagnosticError) as caught:
            analyse(file, {}, costs_with(rows, tmp_path))
        (finding,) = caught.value.diagnostics
        assert finding.code == "S404"
        assert "rows of 2 ranks" in finding.message
    for shape in ((1, 3, 4, 4), (1, 2, 5, 4)):
        with pytest.raises(DiagnosticError) as caught:
            analyse(file, {}, costs_with(recorded(tmp_path, np.ones(shape).tolist()), tmp_path))
        assert "2 layers with experts and 4 microbatches" in caught.value.diagnostics[0].message
    assert analyse(file, {}, costs_with("per_rank = [1.5, 0.5, 1, 1]")).inside is not None


def test_the_report_tells_waiting_apart_from_exposed(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    arguments = ["check", "dualpipev", "-D", "P=2", "-D", "M=6", "--cost-file", str(file)]
    file.write_text(CELLS)
    assert "waiting" not in CliRunner().invoke(main, arguments).output
    file.write_text(CELLS + "[cell.rows]\nper_rank = [1.5, 0.5]\n")
    facts = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)["cells"]
    assert [rank["rows"] for rank in facts["group"]] == [1.5, 0.5]
    assert facts["waiting"] == sum(rank["waiting"] for rank in facts["group"]) / 2 > 0
    assert np.isclose(sum(facts["shares"].values()), 1)
    assert facts["shares"]["waiting"] > 0
    assert "waiting for a fuller rank" in CliRunner().invoke(main, arguments).output


@in_sweeps("test_spans_of_a_rank_are_its_sums")
@pytest.mark.slow
@short_search()
def test_a_drawing_of_a_cell_shows_the_fullest_and_the_emptiest_rank(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    arguments = ["show", "zbh1", "-D", "P=2", "-D", "M=4", "--cell", "F", "--cost-file", str(file)]
    texts = {}
    for rows in ("", "[cell.rows]\nper_rank = [1.0, 1.5, 0.5]\n"):
        file.write_text(CELLS + rows)
        texts[bool(rows)] = [CliRunner().invoke(main, [*arguments, "--format", "term"]).output]
    svg = tmp_path / "cell.svg"
    assert CliRunner().invoke(main, [*arguments, "-o", str(svg)]).exit_code == 0
    texts[True].append(svg.read_text())
    for text in texts[True]:
        assert "rank 1 with 1.5 of the mean rows" in text
        assert "rank 2 with 0.5 of the mean rows" in text
    assert "compute waits for a fuller rank to start 0.combine.rail" in texts[True][1]
    assert not any("fuller" in text or "mean rows" in text for text in texts[False])
