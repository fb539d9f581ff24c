"""The evaluation program: exactly the forwards of a training program, in its order, sound, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.ir.ops import OpKind
from schedc.ir.program import Channel, InstructionKind, Program, computation
from schedc.ir.schedule import Schedule
from schedc.ir.verify_program import verify_program
from schedc.step.program.forward_only import forward_only
from schedc.step.program.insert_communication import insert_communication
from support.random_schedules import ORDERS, published, random_schedule

NAMES = [path.stem.rsplit("_P4", 1)[0] for path in ORDERS]


def forwards(schedule: Schedule) -> list[list[tuple[int, int]]]:
    return [
        [(op.stage, op.microbatch) for op in schedule.ops(rank) if op.kind is OpKind.F]
        for rank in range(schedule.ranks)
    ]


def assert_is_evaluation_of(evaluation: Program, schedule: Schedule) -> None:
    assert verify_program(evaluation) == []
    kinds = {InstructionKind.F, InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT}
    assert set(evaluation.kind.tolist()) <= {int(kind) for kind in kinds}
    assert set(evaluation.channel[evaluation.channel >= 0].tolist()) <= {int(Channel.ACTIVATION)}
    assert forwards(computation(evaluation)[0]) == forwards(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_forwards_of_published_orders(name: str) -> None:
    schedule = published(name)
    training = insert_communication(schedule)
    assert_is_evaluation_of(forward_only(training), schedule)
    assert forward_only(training) == forward_only(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_forwards_of_any_legal_order(seed: int) -> None:
    schedule = random_schedule(seed)
    assert_is_evaluation_of(forward_only(schedule), schedule)


def test_places_in_the_source_are_kept() -> None:
    training = insert_communication(published("dualpipev"))
    evaluation = forward_only(training)
    assert evaluation.source_name == "dualpipev_P4_M8.csv"
    first = int(np.flatnonzero(evaluation.kind == InstructionKind.F)[-1])
    assert evaluation.where(first).startswith("dualpipev_P4_M8.csv:4:")


def test_what_a_program_computes_is_its_schedule() -> None:
    for name in NAMES:
        schedule = published(name)
        back, rows = computation(insert_communication(schedule))
        for column in ("rank_start", "kind", "stage", "microbatch"):
            assert np.array_equal(getattr(back, column), getattr(schedule, column))
        assert np.array_equal(back.pair >= 0, schedule.pair >= 0)
        assert rows.size == len(schedule)


def test_an_evaluation_program_that_lacks_a_forward_is_refused() -> None:
    schedule = published("1f1b")
    program = forward_only(schedule)
    row = int(np.flatnonzero((program.kind == InstructionKind.F) & (program.stage == 3))[-1])
    names = ("kind", "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "channel", "message", "batch",
             "op", "phase", "span")  # fmt: skip
    columns = {name: np.delete(getattr(program, name), row) for name in names}
    shorter = Program(
        program.name, program.sizes, program.placement, program.rank_start - np.array([0, 0, 0, 0, 1]), **columns,
        phases=program.phases, spans=program.spans,
    )  # fmt: skip
    assert {finding.code for finding in verify_program(shorter)} == {"S203"}
