"""A step and its passes: the table fits the functions, and what is asked for decides what runs."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from importlib import import_module

import pytest

from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.load.library import Text
from schedc.plan.passes import PASSES, Pass, Step, lower
from schedc.source import Source
from schedc.step.costs.costs import Costs

OFFLOADED = "sched 1\nplan mine = dualpipev(P = 2, M = 8) { layers 4 memory 3 host 100 at 0.4 offload auto }\n"


def opened(text: str = "", costs: Costs | None = None) -> Step:
    tree = open_input(Text(Source("mine.sched", text)) if text else "1f1b")
    return Step(tree, {}, costs or Costs())


@pytest.mark.parametrize("row", PASSES, ids=lambda row: row.name)
def test_a_row_fits_its_function(row: Pass) -> None:
    file, _, name = row.run.partition(":")
    inspect.signature(getattr(import_module(f"schedc.{file}"), name)).bind(*row.needs)
    names = {field.name for field in fields(Step)} | {"itself", "placed", "works", "cell_times"}
    assert {need.partition(".")[0] for need in row.needs} | set(row.gives) | set(row.after) <= names


def test_a_pass_needs_what_an_earlier_one_gives() -> None:
    there = {"tree", "sizes", "given", "replicas", "itself", "placed", "works", "cell_times"}
    for row in PASSES:
        optional = {"lines"} if row.name in ("given", "refuse replicas") else set()
        assert {need.partition(".")[0] for need in row.needs} - optional <= there, row.name
        there |= set(row.gives)
    assert there >= {field.name for field in fields(Step)} - {"done"}


def test_what_is_wanted_decides_what_runs() -> None:
    step = lower(opened(), "memory")
    assert step.done == {"order", "given", "memory"}
    assert (step.timeline, step.instructions) == (None, None)
    assert lower(step, "timeline").done - step.done == {"times"}
    assert lower(step, "memory") is step


def test_a_step_from_choices_made_elsewhere_runs_what_follows_them() -> None:
    """Its order, plan and layout are given: no text is read, and times and bytes are those of the text."""
    whole = lower(opened(OFFLOADED), "predicted", "memory", "instructions")
    early = {"read", "order", "given", "layout", "attach", "layers", "levels"}
    made = Step(
        None, {}, whole.given, done=frozenset(early), lines=whole.lines, dependencies=lower(opened(OFFLOADED), "plan")
        .dependencies, layout=whole.layout, plan=whole.plan, layers=whole.layers,
    )  # fmt: skip
    again = lower(made, "predicted", "memory", "instructions")
    assert again.predicted.end.tobytes() == whole.predicted.end.tobytes()
    assert again.memory.peak_memory.tolist() == whole.memory.peak_memory.tolist()
    assert len(again.instructions.works) == len(whole.instructions.works) > 0


def test_a_host_with_room_leaves_the_bytes_of_ranks() -> None:
    gigabytes = OFFLOADED.replace("memory 3", "activations dense 1 GB memory 3 GB").replace(
        "100 at 0.4", "100 GB at 4 GB/s"
    )
    step = lower(opened(gigabytes), "bytes")
    assert step.bytes is not None
    assert step.bytes.peak.tolist() == [3e9, 3e9]


@pytest.mark.parametrize("wanted", ["timeline", "predicted", "memory", "claims", "instructions", "bytes"])
def test_nothing_follows_from_a_step_that_does_not_fit(wanted: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        lower(opened(OFFLOADED.replace("host 100 at 0.4 offload auto", "").replace("memory 3", "memory 1")), wanted)
    assert [finding.code for finding in error.value.diagnostics] == ["S406"]


def test_other_costs_keep_the_order_and_the_works() -> None:
    step = lower(opened(OFFLOADED), "offloading", "bytes")
    slower = lower(step.under(replace(step.costs, F=2.0)), "timeline", "memory")
    assert slower.timeline.makespan > lower(step, "timeline").timeline.makespan
    assert slower.memory.peak_memory.tolist() == lower(step, "memory").memory.peak_memory.tolist()
