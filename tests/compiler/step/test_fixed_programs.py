"""Cells that run programs of other times than their own: what files say, and steps that are monotone in costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import CellCosts, SegmentTimes, cell_program, stage_shape
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.delays import delay_batch, program_delays
from schedc.cell.graph import QUEUES
from schedc.cell.simulate import ArrivalTimes, play
from schedc.cell.table import CellTable, read_table, write_table
from schedc.cell.tasks import tasks_of
from schedc.compiler import analyse
from schedc.source import Source
from schedc.step.cells.cell_forms import cell_forms
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.fixed_programs import CodedProgram, FixedPrograms, cell_delays
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.dependencies import Dependencies

SEGMENTS = ("attention", "dense", "experts", "permute", "post", "shared")
EXCHANGES = ("combine.node", "combine.rail", "dispatch.node", "dispatch.rail")


def costs_of(times: list[float]) -> CellCosts:
    rows = np.reshape(times, (len(SEGMENTS) + len(EXCHANGES), 3)).tolist()
    segments = {name: SegmentTimes(*row) for name, row in zip(SEGMENTS, rows, strict=False)}
    exchanges = {name: SegmentTimes(*row[:2]) for name, row in zip(EXCHANGES, rows[len(SEGMENTS) :], strict=True)}
    return CellCosts.of(segments, exchanges)


TYPICAL = [20, 20, 18, 30, 30, 30, 20, 20, 26, 2, 3, 0, 2, 3, 0, 6, 6, 6, *([8, 8, 0] * 4)]
OWN = costs_of(TYPICAL)
FAST, SLOW = (replace(costs_of([*TYPICAL[:18], *([time, time, 0] * 4)]), brief=True) for time in (1, 40))


def table(ordered_by: Mapping[str, object]) -> list[tuple[str, str]]:
    _, problems = read_table({"attention": {"F": 1.0}, "dispatch": {"rail": 1.0}, "ordered_by": ordered_by})
    return [(code, message) for code, message, *_ in problems]


def test_a_file_names_the_times_that_orders_follow() -> None:
    whole = CellTable(OWN, (("moe",), ("dense", "moe")), "hierarchical", ordered_by=SLOW)
    read = parse_costs(Source("c.toml", dump_costs(Costs(cell=whole)))).cell
    assert read == whole
    assert read is not None
    assert (read.ordering.exchanges, read.ordering.brief) == (SLOW.exchanges, True)
    some = replace(whole, ordered_by=CellCosts.of({"experts": SegmentTimes(9, 9, 9)}))
    assert dict(some.ordering.segments) == dict(OWN.segments) | {"experts": SegmentTimes(9, 9, 9)}
    assert some.ordering.exchanges == OWN.exchanges
    assert replace(whole, ordered_by=None).ordering is OWN
    assert "ordered_by" not in "\n".join(write_table(replace(whole, ordered_by=None)))


def test_only_parts_that_cells_have_get_other_times() -> None:
    assert table({"attention": {"F": 2.0}, "dispatch": {"rail": 3.0}}) == []
    assert table({"experts": {"F": 2.0}}) == [("S402", "`experts` of `ordered_by` has no time in [cell]")]
    assert table({"attention": {"F": -2.0}}) == [("S402", "`F` of `attention` is -2.0")]
    assert [code for code, _ in table({"slices": {}})] == ["S401", "S402"]
    assert read_table({"ordered_by": 2.0})[1][0][:2] == ("S402", "`ordered_by` is 2.0")


def test_the_compiler_runs_the_programs_of_the_file() -> None:
    """A step of programs for slow links is longer than that of the order for its own times."""
    both = {}
    for ordered_by in (None, SLOW):
        whole = CellTable(OWN, (("moe", "moe"),), "hierarchical", ordered_by=ordered_by)
        inside = analyse("dualpipev", {"P": 2, "M": 8}, Costs(cell=whole)).inside
        assert inside is not None
        for kind in inside.kinds:
            assert kind.program == cell_program(kind.kind, kind.forward, kind.backward, whole.ordering)
        both[ordered_by] = inside.late_wait.makespan
    assert both[None] < both[SLOW]


@settings(deadline=None, max_examples=30)
@given(times=st.lists(st.floats(0, 40), min_size=30, max_size=30), arrivals=st.tuples(*[st.floats(0, 90)] * 3))
def test_delays_are_those_of_a_simulation(times: list[float], arrivals: tuple[float, float, float]) -> None:
    shape, costs = stage_shape(["moe", "moe"], "flat"), costs_of(times)
    program = cell_program("FB", shape, shape, SLOW)
    played = play(program, shape, shape, costs, arrivals=ArrivalTimes(*arrivals))
    ends = (program_delays(program, shape, shape, costs) + np.array(arrivals)).max(axis=1)
    assert ends == pytest.approx(np.array([played.duration, played.activation_at, played.gradient_at]), rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(times=st.lists(st.floats(0, 40), min_size=30, max_size=30))
def test_the_loop_of_a_program_gives_the_bits_of_its_columns(times: list[float]) -> None:
    """Both kinds of lanes and shared experts, in a pair and in a forward alone, under two costs side by side."""
    shape = stage_shape(["moe", "moe"], "hierarchical")
    for kind, graphs in (("FB", (shape, shape)), ("F", (shape, None))):
        tasks, program = tasks_of(kind, *graphs), cell_program(kind, *graphs, SLOW)
        duration = CellCostBatch.of([costs_of(times), costs_of(times[::-1])]).durations(tasks)
        code, out = CodedProgram.of(program, tasks), np.empty((3, 3, 2))
        cell_delays(code.action, code.number, code.queue, len(QUEUES), duration, out)
        assert out.tolist() == delay_batch(program, tasks, duration).tolist()


KNOWN = {
    name: Dependencies.of(analyse(name, {"P": 2, "M": 4}).schedule) for name in ("dualpipev", "1f1b_overlap", "zbv")
}
TIMES = st.lists(st.floats(0, 40), min_size=30, max_size=30)


@pytest.mark.sweep
@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(sorted(KNOWN)), times=TIMES, raised=st.integers(0, 30), more=st.floats(0, 40))
def test_no_step_of_fixed_programs_falls_where_a_time_grows(
    name: str, times: list[float], raised: int, more: float
) -> None:
    """Each step is that of a simulation alone, to rounding. Twice all times is twice the step, to the last bit."""
    known, latency = KNOWN[name], 3.0
    shape = stage_shape(["dense", "moe"], "hierarchical")
    shapes = (shape,) * known.schedule.stages
    cells = cell_forms(known, shapes, shapes)
    grown = [time + more * (at == raised) for at, time in enumerate(times)]
    batch = CellCostBatch.of([costs_of(times), costs_of(grown), costs_of([2 * time for time in times])])
    p2p = np.array([latency, latency + more * (raised == 30), 2 * latency])
    found = FixedPrograms.of(known, cells, (FAST, SLOW)).times(batch, p2p)
    assert (found.makespan[:, 1] >= found.makespan[:, 0] * (1 - 1e-12)).all()
    assert (found.makespan[:, 2] == 2 * found.makespan[:, 0]).all()
    for row, ordered_by in enumerate((FAST, SLOW)):
        alone = price(known, shapes, costs_of(times), latency, ordered_by=ordered_by).late_wait
        assert found.makespan[row, 0] == pytest.approx(alone.makespan, rel=1e-12)
        assert found.span[row, 0] == pytest.approx(alone.span.max(), rel=1e-12, abs=1e-9)
