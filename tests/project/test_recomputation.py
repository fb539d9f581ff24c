"""`R`, recomputation as an op: syntax, numbers, legality, time, memory, and cells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import Action, CellCosts, CellStep, Half, SegmentTimes, StageShape, cell_program, stage_shape
from schedc.cell.collectives import verify_collectives
from schedc.cell.issue_order import CellOnRank, ExpertRanks
from schedc.cell.predict import predict
from schedc.cell.verify import verify_cell as verify_cell
from schedc.claims.check import check_claims
from schedc.cli import main
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.drawing import palette
from schedc.drawing.svg import draw_svg
from schedc.elaborate import elaborate
from schedc.elaborate.names import check
from schedc.exact.times import BUBBLE
from schedc.formulas.cost_domains import spaces_of
from schedc.formulas.measure import times_at
from schedc.interchange.csv_trainers import to_nemo_automodel, to_torchtitan
from schedc.interchange.dot import schedule_graph
from schedc.interchange.megatron import to_megatron
from schedc.interchange.torch_csv import from_torch_csv, to_torch_csv
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.interchange.trace import to_trace
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.ops import OpKind
from schedc.ir.placement import linear
from schedc.ir.program import Instruction, InstructionKind, Program, computation
from schedc.ir.recomputed import recomputed_ops, recomputed_slots
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.verify import verify
from schedc.ir.verify_program import verify_program
from schedc.search.tune import tune
from schedc.source import Source
from schedc.step.batch import simulate_batch
from schedc.step.cells.cell_pricing import price
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.program.forward_only import forward_only
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from schedc.syntax import tree as t
from schedc.syntax.parser import parse
from support import orders
from support.random_schedules import random_schedule, with_recomputation
from support.sweeps import swept

ONE_F_ONE_B = """sched 1
schedule a(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    let w = min(P - 1 - r, M)
    phase warmup repeat w { F }
    phase steady repeat M - w { F  R  B }
    phase drain  repeat w { R  B }
  }
  expect %s
}
"""


def tree_of(body: str, place: str = "linear", sizes: str = "P: ranks = 2, M: microbatches = 2") -> t.ScheduleTree:
    """A schedule whose statements stand on line 2."""
    text = f"schedule a({sizes}) {{ place {place} rank r {{\n{body}\n}} }}"
    return parse(Source("test.sched", text)).schedules[0]


def rank0(body: str, place: str = "linear", **sizes: int) -> str:
    return " ".join(map(str, elaborate(tree_of(body, place), sizes).ops(0)))


def one_f_one_b(claim: str = "ops == 3*M", **sizes: int) -> tuple[t.ScheduleTree, Schedule]:
    tree = parse(Source("a.sched", ONE_F_ONE_B % claim)).schedules[0]
    return tree, elaborate(tree, sizes)


# Written and numbered.


def test_each_takes_the_next_microbatch_of_its_chunk() -> None:
    assert rank0("repeat 2 { F } R B R B") == "0F0 0F1 0R0 0B0 0R1 0B1"
    assert rank0("F F R @ 1 R I @ 1 B W") == "0F0 0F1 0R1 0R0 0I1 0B0 0W1"
    assert rank0("F0 F1 R[1 - r] R0 B1 B0", "v") == "0F0 3F0 3R0 0R0 3B0 0B0"


def test_of_segments_the_last_is_first_as_in_backwards() -> None:
    sizes = "P: ranks = 1, M: microbatches = 2, k: segments = 2"
    made = elaborate(tree_of("repeat 4 { F } repeat 4 { R B }", sizes=sizes), {})
    assert " ".join(str(op) for op in made.ops(0) if op.kind == OpKind.R) == "0R1 0R0 0R3 0R2"


@pytest.mark.parametrize(
    ("line", "code", "column"),
    [
        ("F & R", "S108", 1),
        ("R & B", "S108", 1),
        ("R", "S110", 1),
        ("policy prefer F { R0 }", "S126", 19),
        ("policy prefer R > F { F0 }", "S126", 15),
        ("policy cap F - R0 <= P { F0 }", "S126", 16),
        ("timed fill W { R0 at 3 }", "S126", 16),
    ],
)
def test_where_it_cannot_stand(line: str, code: str, column: int) -> None:
    place = "linear" if code == "S108" else "v"
    tree = tree_of(line, place)
    with pytest.raises(DiagnosticError) as caught:
        elaborate(tree, {})
    assert (code, 2, column) in [d.position for d in caught.value.diagnostics]
    assert not check(tree) or all(d.help for d in caught.value.diagnostics)


def test_a_timed_block_and_phases_around_a_policy_place_it() -> None:
    sizes = {"P": 1, "M": 2}
    assert rank0("timed { F at 0  R at 5  B at 7  F at 1  R at 3  B at 4 }", **sizes) == "0F0 0F1 0R0 0B0 0R1 0B1"
    assert rank0("repeat 2 { F } R policy prefer B { B } R B", **sizes) == "0F0 0F1 0R0 0B0 0R1 0B1"


def test_an_order_written_for_more_drops_it_with_its_microbatch() -> None:
    text = "schedule a(P: ranks = 1, M: microbatches = 1) { place linear order for 2 rank r { F F R B R B } }"
    made = elaborate(parse(Source("test.sched", text)).schedules[0], {})
    assert [str(op) for op in made.ops(0)] == ["0F0", "0R0", "0B0"]


# Judged.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0F0 0R0 0B0 0F1 0I1 0W1", []),
        ("0F0 0F1 0R1 0R0 0B0 0R5 0B1", [("S201", 1, 21)]),
        ("0R0 0F0 0B0 0F1 0B1", [("S204", 1, 1)]),
        ("0F0 0B0 0R0 0F1 0B1", [("S204", 1, 5)]),
        ("0F0 0R0 0R0 0B0 0F1 0B1", [("S205", 1, 9)]),
        ("0F0 0F1 0B1 (0R0;0B0)", [("S204", 1, 18), ("S206", 1, 14)]),
        ("0F0 0R0 0F1 0B1", [("S203", 1, 1)]),
        ("0F0 0B0 0F1 0B1 1R0", [("S202", 1, 17), ("S205", 2, 5)]),
    ],
)
def test_each_invariant(line: str, expected: list[tuple[str, int, int]]) -> None:
    found = verify(orders.schedule([line, "1F0 1R0 1B0 1F1 1B1"], linear(2, 2)))
    assert [d.position for d in found] == expected


def test_a_late_one_is_named_with_the_remedy() -> None:
    (found,) = verify(orders.schedule(["0F0 0B0 0R0"], linear(1, 1)))
    assert found.message == "full backward of microbatch 0 on stage 0 runs before its recomputation"
    assert found.help == "on this rank, 0R0 has to come before 0B0"


# What it takes.


def test_it_hides_where_a_rank_waits_for_a_gradient() -> None:
    """The first R of rank 0 runs while it waits; recomputed inside the backwards, the same work is all in the way."""
    P, M = 4, 8
    schedule = one_f_one_b(P=P, M=M)[1]
    inside = schedule.only(np.flatnonzero(schedule.kind != OpKind.R))
    costs = Costs(F=2.0, I=2.0, W=2.0, R=2.0)
    apart = simulate(schedule, costs)
    assert apart.makespan == (M + P - 1) * (2 + 4 + 2) - (P - 1) * 2
    assert simulate(inside, replace(costs, B=6.0)).makespan == (M + P - 1) * (2 + 6)
    assert apart.busy.tolist() == [M * 8.0] * P  # it counts as work


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(st.integers(0, 10**6))
def test_random_orders_with_it_compile_and_come_back(seed: int) -> None:
    schedule = with_recomputation(random_schedule(seed), seed)
    assert check_schedule(schedule) == []
    assert parse_schedule(print_schedule(schedule)) == schedule
    program = insert_communication(schedule)
    assert verify_program(program) == []
    assert [parse_program(print_program(program)), program_from_json(program_to_json(program))] == [program, program]
    again, _ = computation(program)
    assert again.kind.tolist() == schedule.kind.tolist()
    assert recomputed_slots(program) == recomputed_slots(schedule)
    costs = Costs(F=3.0, I=2.0, W=1.0, R=2.5, p2p=0.5)
    assert simulate_batch(Dependencies.of(schedule), [costs]).makespan[0] == simulate(schedule, costs).makespan
    plain = Costs(F=3.0, I=2.0, W=1.0, R=0.0, p2p=0.5)
    assert (
        simulate(schedule, plain).makespan
        == simulate(schedule.only(np.flatnonzero(schedule.kind != OpKind.R)), plain).makespan
    )
    kinds = forward_only(program).kind
    assert (np.isin(kinds, (InstructionKind.F,)) | (kinds > InstructionKind.CELL)).all()


def test_costs_are_those_of_the_forward_unless_said() -> None:
    assert Costs(F=(1.0, 3.0)).resolved(2).R.tolist() == [1.0, 3.0]
    assert Costs.from_options(["R=0.5", "recomputed=0.25"]).resolved(2).R.tolist() == [0.5, 0.5]
    costs = Costs(R=(0.5, 2.0), recomputed=0.25)
    assert parse_costs(Source("costs.toml", dump_costs(costs))) == costs


def test_claims_speak_of_it() -> None:
    """The R of a rank's first microbatches runs before their gradients arrive, all others in turn."""
    claims = {"makespan == (M+P-1)*(F+B+R) - (P-1)*R when R <= F": True, "makespan == (M+P-1)*(F+B)": False}
    for claim, holds in claims.items():
        tree, schedule = one_f_one_b(claim)
        (result,) = check_claims(tree.claims, schedule)
        assert result.holds is holds
    assert result.counterexample is not None
    assert "R" in result.counterexample.costs


# What is held.


def test_memory_is_held_from_the_recomputation() -> None:
    schedule = orders.schedule(["0F0 0F1 0R0 0B0 0F2 0B1 0B2"], linear(1, 3))
    memory = measure_memory(schedule, Costs(activation=10.0, recomputed=2.0))
    assert memory.activations.tolist() == [0, 1, 2, 1, 2, 1, 0]
    assert memory.memory.tolist() == [2, 12, 20, 10, 20, 10, 0]
    assert recomputed_ops(schedule).tolist() == [True, False, True, True, False, False, False]


def test_split_backwards_free_it_with_their_weights() -> None:
    memory = measure_memory(
        orders.schedule(["0F0 0R0 0I0 0W0"], linear(1, 1)), Costs(activation=10.0, pending_weight=4.0)
    )
    assert memory.activations.tolist() == [0, 1, 1, 0]
    assert memory.memory.tolist() == [0, 10, 4, 0]


# Its cells.

FULL = {"permute", "dispatch", "experts", "shared"}
TIMES = CellCosts.of(
    {"attention": SegmentTimes(4, 4, 4), "experts": SegmentTimes(6, 6, 6), "shared": SegmentTimes(2, 2, 2)},
    {"dispatch.rail": 5, "combine.rail": 5},
)


def marked(shape: StageShape) -> StageShape:
    """A MoE stage, marked with what the level `full` recomputes."""
    return replace(shape, nodes=tuple(replace(node, recomputed=node.role in FULL) for node in shape.nodes))


SHAPE = marked(stage_shape(["moe", "moe"]))


def test_its_cell_does_again_what_the_backward_then_finds() -> None:
    program = cell_program("R", None, SHAPE, TIMES)
    assert verify_cell(program, None, SHAPE) == []
    assert {step.half for step in program.steps} == {Half.RECOMPUTE}
    assert {step.node for step in program.steps} == set(SHAPE.recomputed)
    assert (program.activation_at, program.gradient_at) == (-1, -1)
    whole, ready = (cell_program("I", None, shape, TIMES) for shape in (SHAPE, SHAPE.ready))
    assert SHAPE.ready.recomputed == ()
    assert SHAPE.ready != SHAPE
    assert [step for step in ready.steps if step.half is Half.RECOMPUTE] == []
    assert sorted((*program.steps, *ready.steps)) == sorted(whole.steps)
    # the shared experts are done again while rows travel, so that it takes less than its parts
    taken = predict(program, None, SHAPE, TIMES)
    assert taken.duration < taken.compute + taken.communication


def test_a_cell_that_leaves_out_a_step_is_refused() -> None:
    program = cell_program("R", None, SHAPE, TIMES)
    node = next(step.node for step in program.steps if step.action is Action.RUN)
    less = replace(program, steps=tuple(step for step in program.steps if step.node != node))
    assert {found.code for found in verify_cell(less, None, SHAPE)} == {"S320"}
    more = replace(program, steps=(*program.steps, CellStep(Action.RUN, Half.BACKWARD, 0)))
    assert {found.code for found in verify_cell(more, None, SHAPE)} == {"S320"}


def test_a_stage_without_levels_has_an_empty_cell() -> None:
    plain = stage_shape(["moe"])
    assert cell_program("R", None, plain, TIMES).steps == ()
    assert plain.ready is plain


def test_schedules_are_priced_by_its_cells() -> None:
    """One F, an R in the gap or inside the backward: the same segments, and the program of the backward is another."""
    lines = ["0F0 0R0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    inside = price(Dependencies.of(orders.schedule(lines, linear(2, 2))), [SHAPE, SHAPE], TIMES)
    kinds = [(kind.kind, kind.count, bool(kind.backward and kind.backward.recomputed)) for kind in inside.kinds]
    assert sorted(kinds) == [("B", 1, False), ("B", 3, True), ("F", 4, False), ("R", 1, True)]
    compute = {(kind, again): 0.0 for kind, _, again in kinds}
    for kind, (name, _, again) in zip(inside.kinds, kinds, strict=True):
        compute[name, again] = kind.prediction.compute
    assert compute["R", True] + compute["B", False] == compute["B", True]


def _judge(groups_differ: bool) -> list[Diagnostic]:
    schedule = orders.schedule(["0F0 0R0 0B0"], linear(1, 1))
    program = insert_communication(schedule)

    def cell_of(_: int, expert: int, item: Instruction) -> CellOnRank:
        kind = item.kind.name
        again = kind == "R" and not (groups_differ and expert == 1)
        shape = SHAPE if kind != "B" else SHAPE.ready
        shape = shape if again or kind != "R" else SHAPE.ready
        forward, backward = (SHAPE, None) if kind == "F" else (None, shape)
        return CellOnRank(forward, backward, cell_program(kind, forward, backward, TIMES))

    return verify_collectives(program, ExpertRanks(2, 1), cell_of)


def test_all_ranks_of_a_group_dispatch_again_or_none() -> None:
    assert _judge(groups_differ=False) == []
    (found,) = _judge(groups_differ=True)
    assert found.code == "S321"
    assert "0R0 again 0.dispatch.rail" in "".join(found.notes)


# Targets, search, commands and formulas.


def test_targets_that_have_no_such_op_say_so() -> None:
    schedule = orders.schedule(["0F0 0R0 0B0"], linear(1, 1))
    program = insert_communication(schedule)
    for write in (to_torch_csv, to_torchtitan, to_nemo_automodel, to_megatron):
        with pytest.raises(DiagnosticError) as caught:
            write(schedule)
        assert [d.code for d in caught.value.diagnostics] == ["S609"]
    with pytest.raises(DiagnosticError, match="S609"):
        to_lowered_csv(program)
    with pytest.raises(DiagnosticError) as caught:
        from_torch_csv("0F0,0R0,0B0\n")
    assert [d.position for d in caught.value.diagnostics] == [("S601", 1, 5)]


def test_others_have_it() -> None:
    schedule = one_f_one_b(P=2, M=2)[1]
    timeline = simulate(schedule)
    events = json.loads(to_trace(schedule, timeline, measure_memory(schedule)))["traceEvents"]
    assert sum(event.get("cat") == "R" for event in events) == 4
    assert '[label="0R0\\n' in schedule_graph(schedule, timeline).source
    drawn = draw_svg(schedule, timeline, measure_memory(schedule))
    assert "recomputation" in drawn
    assert palette.FILLS[OpKind.R][0] in drawn
    assert 'class="R0"' in drawn


def test_its_order_is_not_searched() -> None:
    with pytest.raises(DiagnosticError) as caught:
        tune(one_f_one_b()[1], Costs())
    assert [d.position for d in caught.value.diagnostics] == [("S409", 7, 36)]


def test_commands_tell_its_share_and_leave_out_the_csv(tmp_path: Path) -> None:
    file = tmp_path / "a.sched"
    file.write_text(ONE_F_ONE_B % "ops == 3*M")
    facts = json.loads(CliRunner().invoke(main, ["check", str(file), "--cost", "R=0.5", "--json"]).stdout)
    assert facts["recomputation"]["busy"] == [4.0] * 4
    assert facts["recomputation"]["ratio"] == 16.0 / (4 * facts["makespan"])
    compiled = CliRunner().invoke(main, ["compile", str(file), "-o", str(tmp_path / "out")])
    assert "no schedule.csv: torch's has no op R" in compiled.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["program.json", "program.txt", "schedule.svg"]


def test_formulas_have_its_symbol() -> None:
    cells = Dependencies.of(one_f_one_b(P=4, M=8)[1])
    space, latency = spaces_of([cells])
    assert (space.symbols, latency.symbols) == (("F", "B", "R"), ("F", "B", "R", "p2p"))
    times = times_at(cells, space)
    assert times is not None
    assert times.form(BUBBLE, (900, 1700, 500)) == (3, 3, 0)  # (P-1)*(F+B): nothing of R, which is hidden


def test_instructions_are_counted_among_the_cells() -> None:
    program: Program = insert_communication(orders.schedule(["0F0 0R0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], linear(2, 2)))
    (again,) = (item for item in program.instructions(0) if item.kind is InstructionKind.R)
    assert (again.stage, again.microbatch, again.op, again.message) == (0, 0, 1, -1)
