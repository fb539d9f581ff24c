"""Pairs with a weight gradient, `F & W` and `I & W`: times, programs, and gain inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cell import CellCosts, SegmentTimes, cell_program, stage_shape
from schedc.cell.predict import predict
from schedc.cell.serial import serial
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.interchange.targets import TARGETS
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.ops import OpKind, pair_number
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.verify_program import verify_program
from schedc.step.batch import simulate_batch
from schedc.step.costs.costs import Costs, load_costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from support.paths import ROOT
from support.weight_pairs import schedule_of_pairs

PAIRS = {"FW": "WF", "IW": "IW"}
"""By kind of cell, the pair as it is written: the F second, which a reader puts first."""


def program_of(name: str) -> Program:
    return insert_communication(schedule_of_pairs(PAIRS[name]))


@pytest.mark.parametrize("name", PAIRS)
def test_every_form_gives_the_program_back(name: str) -> None:
    schedule, program = schedule_of_pairs(PAIRS[name]), program_of(name)
    pairs = program.kind == InstructionKind.CELL
    assert pairs.sum() == 6
    assert set(program.backward[pairs].tolist()) == {pair_number(OpKind[name[0]], OpKind.W)}
    assert {x.kind_name for x in program.instructions(0) if x.kind is InstructionKind.CELL} == {name}
    assert verify_program(program) == []
    assert parse_schedule(print_schedule(schedule)) == schedule
    assert parse_program(print_program(program)) == program
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program
    back, _ = computation(program)
    for column in ("kind", "stage", "microbatch"):
        assert np.array_equal(getattr(back, column), getattr(schedule, column))


def test_both_ops_of_a_pair_have_their_stage_and_microbatch() -> None:
    pair = next(x for x in program_of("IW").instructions(1) if x.kind is InstructionKind.CELL)
    assert pair.ops == ((OpKind.I, 1, 1), (OpKind.W, 1, 0))
    assert (pair.stages, pair.last_slot) == ((1, 1), (1, 0))


@pytest.mark.parametrize("name", PAIRS)
def test_other_trainers_have_no_such_pair(name: str) -> None:
    """They would run its ops in turn, in silence."""
    schedule, pair = schedule_of_pairs(PAIRS[name]), "I & W" if name == "IW" else "F & W"
    for target in ("csv", "csv-lowered", "torchtitan", "nemo", "megatron"):
        with pytest.raises(DiagnosticError, match=f"has no pair {pair}") as caught:
            TARGETS[target].write(schedule, Costs())
        assert [finding.code for finding in caught.value.diagnostics] == ["S615"]


def test_compile_leaves_the_csv_out(tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["compile", "zbh1_overlap", "-D", "P=2", "-D", "M=5", "-o", str(tmp_path)])
    assert (result.exit_code, "no schedule.csv: torch's has no pair F & W" in result.output) == (0, True)
    assert not (tmp_path / "schedule.csv").exists()


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_takes_the_time_of_both_ops_where_nothing_is_known_of_its_inside(name: str) -> None:
    schedule = schedule_of_pairs(PAIRS[name])
    costs = Costs(F=(3.0, 5.0), I=(2.0, 7.0), W=(1.0, 4.0), FB=0.5)
    timeline = simulate(schedule, costs)
    cells, first = timeline.dependencies, OpKind[name[0]]
    resolved = costs.resolved(2)
    for cell in np.flatnonzero(cells.pairs).tolist():
        stage = schedule.stage[cells.first[cell]]
        own = getattr(resolved, first.name)[stage] + resolved.W[schedule.stage[cells.second[cell]]]
        assert timeline.end[cell] - timeline.start[cell] == pytest.approx(own)
    assert simulate_batch(cells, [costs]).makespan[0] == timeline.makespan


def test_a_gradient_in_a_pair_is_the_message_of_its_first_op() -> None:
    cells = Dependencies.of(schedule_of_pairs("IW"))
    assert np.array_equal(cells.backward[cells.pairs], cells.first[cells.pairs])
    assert not cells.with_backward.any()
    sent = [x for x in program_of("IW").instructions(1) if x.kind is InstructionKind.SEND]
    assert [(x.stage, x.microbatch) for x in sent] == [(1, m) for m in range(4)]


def test_the_forward_of_a_pair_allocates_before_the_weight_gradient_frees() -> None:
    memory = measure_memory(schedule_of_pairs("WF"))
    assert memory.peak_activations.tolist() == [2, 2]
    assert memory.peak_activations_between.tolist() == [1, 1]


# Inside.

COSTS = CellCosts.of(
    {
        "attention": SegmentTimes(20, 20, 18),
        "shared": SegmentTimes(6, 6, 0),
        "experts": SegmentTimes(20, 20, 26),
        "post": SegmentTimes(2, 2, 0),
    },
    {"dispatch.node": 17.0, "combine.node": 17.0},
)


@pytest.mark.parametrize("kind", ["FW", "IW"])
def test_a_weight_gradient_fills_the_time_of_the_exchanges(kind: str) -> None:
    shape = stage_shape(("moe", "moe"), nodes=1)
    found = predict(cell_program(kind, shape, shape, COSTS), shape, shape, COSTS)
    assert found.hidden == pytest.approx(1.0)
    assert found.duration == pytest.approx(found.compute)
    one_by_one = predict(serial(kind, shape, shape), shape, shape, COSTS)
    assert one_by_one.exposed == one_by_one.communication


def test_zero_bubble_gains_what_the_design_says() -> None:
    for file, most in (("moe2.toml", 0.92), ("moe2_85.toml", 0.89)):
        costs = load_costs(ROOT / "examples" / "costs" / file)
        priced = [analyse(name, {"P": 4, "M": 16}, costs).inside for name in ("zbh1_overlap", "zbh1")]
        with_pairs, without = (inside.late_wait.makespan for inside in priced if inside is not None)
        assert with_pairs / without <= most
