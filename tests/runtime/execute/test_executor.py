"""The executor's loop: deadlocks, wrong programs, other handlers, names of instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import schedc
from schedc.ir.program import InstructionKind, Program
from schedc_runtime import Pipeline
from schedc_runtime.execute import executor as executor_module
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.executor import Deadlock, Executor, InstructionError, run_together
from schedc_runtime.execute.handlers import HANDLERS
from schedc_runtime.execute.instruction_names import instruction_label, sentence
from schedc_runtime.execute.operands import PairOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.step.losses import Leftovers
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.in_process import InProcessNetwork
from support.runtime_cases import next_token_loss, small_gpt, tokens

COLUMNS = ("kind", "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "channel", "message", "batch",
           "op", "phase", "span")  # fmt: skip


def rows(program: Program, rank: int, kind: InstructionKind) -> list[int]:
    return np.flatnonzero((program.rank == rank) & (program.kind == kind)).tolist()


def reordered(program: Program, order: list[int]) -> Program:
    """The program's rows in another order (within ranks), or fewer of them."""
    starts = np.searchsorted(program.rank[order], np.arange(program.ranks + 1))
    return replace(program, rank_start=starts, **{name: getattr(program, name)[order] for name in COLUMNS})


def without(program: Program, row: int) -> Program:
    return reordered(program, [r for r in range(len(program)) if r != row])


def run(program: Program) -> Any:
    return Pipeline(small_gpt(blocks=4), program, loss_fn=next_token_loss, in_process=True).step(*tokens(8))


@pytest.fixture(params=["table", "written out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How streams run: by the table of calls, or as Python that was made of it."""
    monkeypatch.setattr(executor_module, "WRITTEN_FROM", 1 if request.param == "written out" else 1000)


@pytest.mark.usefixtures("way")
def test_a_deadlock_names_what_each_rank_waits_at() -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    # Rank 0 waits for the first gradient before it sends the activation that rank 1 needs there.
    wait = next(r for r in rows(program, 0, InstructionKind.WAIT) if program.channel[r] == 1)
    recv = next(r for r in rows(program, 0, InstructionKind.RECV) if program.message[r] == program.message[wait])
    rest = [r for r in range(len(program)) if r not in (wait, recv)]
    with pytest.raises(Deadlock) as caught:
        run(reordered(program, [recv, wait, *rest]))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no rank can go on:"
    assert lines[1] == "  rank 0 waits at 0WAIT_RECV_B0: wait for the gradient of stage 1, microbatch 0 from rank 1"
    assert lines[2].startswith("    --> 1f1b.sched:")
    assert lines[3] == "  rank 1 waits at 1WAIT_RECV_F0: wait for the activation of stage 0, microbatch 0 from rank 0"


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda p: without(p, next(r for r in rows(p, 1, InstructionKind.WAIT) if p.channel[r] == 0)),
            InstructionError,
            "rank 1 failed at 1F0.*uses the activation of stage 0 for microbatch 0 before it is there",
        ),
        (
            lambda p: without(p, rows(p, 1, InstructionKind.RECV)[0]),
            InstructionError,
            "waits for a message that it has not posted",
        ),
        (
            lambda p: without(p, rows(p, 1, InstructionKind.WAIT)[-1]),
            Leftovers,
            "the program ended and left behind: message",
        ),
        (
            lambda p: without(p, rows(p, 1, InstructionKind.B)[1]),
            InstructionError,
            "rank 1 failed at .*1SEND_B1.*uses the gradient of stage 1 for microbatch 1 before it is there",
        ),
    ],
    ids=["no wait", "no receive", "no last wait", "no backward"],
)
def test_a_wrong_program_fails_by_name(change: Callable[[Program], Program], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"(?s){text}"):
        run(change(schedc.compile("1f1b", P=2, M=4)))


def test_another_handler_takes_the_place_of_the_cell() -> None:
    """An overlapped cell is a handler given to `bind`; here one that runs the two halves and counts."""
    program = schedc.compile("dualpipev", P=2, M=4)
    cut = partition(small_gpt(), program.stages)
    batch, targets = tokens(4)
    boundaries = infer_boundaries(cut, (batch[:1],))
    seen: list[tuple[int, int]] = []

    def cell(registers: Registers, operands: PairOperands) -> None:
        seen.append((operands.first.microbatch, operands.second.microbatch))
        HANDLERS[InstructionKind.CELL](registers, operands)

    network, executors = InProcessNetwork(2), []
    for rank in range(2):
        stages = {
            s: Stage(cut.modules[s], s, program.stages, loss_fn=next_token_loss)
            for s in np.flatnonzero(program.placement.rank_of_stage[0] == rank).tolist()
        }
        for s, stage in stages.items():
            stage.bind(boundaries[s], boundaries[s + 1])
        code = bind(program, rank, stages, boundaries, {**HANDLERS, InstructionKind.CELL: cell})
        executors.append(Executor(program, code, network.transport(rank), torch.device("cpu")))
    for executor in executors:
        executor.start([(part,) for part in batch.chunk(4)], targets.chunk(4), 0.25)
    run_together(executors)
    assert [executor.registers.leftovers() for executor in executors] == [[], []]
    cells = np.flatnonzero(program.kind == InstructionKind.CELL)
    expected = zip(program.microbatch[cells].tolist(), program.microbatch2[cells].tolist(), strict=True)
    assert sorted(seen) == sorted(expected)
    assert len(seen) > 0


def test_names_follow_torch() -> None:
    program = schedc.compile("dualpipev", P=2, M=4)
    names = {instruction_label(program, row) for row in range(len(program))}
    assert {"0F0", "0SEND_F0", "1RECV_F0", "1WAIT_RECV_F0", "0WAIT_SEND_F0", "3SEND_B0", "2RECV_B0"} <= names
    assert any(name.endswith("OVERLAP_F_B") for name in names)
    for row in range(len(program)):
        assert sentence(program, row).startswith(instruction_label(program, row))
    reduced = schedc.compile("dualpipe", P=2, M=4)
    assert {"0REDUCE_GRAD", "1REDUCE_GRAD"} <= {instruction_label(reduced, row) for row in range(len(reduced))}
