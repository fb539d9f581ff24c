"""Every schedule gives the bits of the serial reference, and the numbers of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Channel, InstructionKind, Program
from schedc_runtime import Pipeline
from schedc_runtime.testing import pool
from support.runtime_cases import check_parity, differences, model_for, next_token_loss, oracle, small_gpt, tokens
from support.sweeps import swept, thinned

ON_PROCESSES = {
    2: [
        ("gpipe", {"M": 3}), ("1f1b", {"M": 5}), ("interleaved_1f1b", {"M": 4, "v": 2}), ("zbh1", {"M": 2}),
        ("zbv", {"M": 3}), ("dualpipe", {"M": 4}), ("dualpipev", {"M": 7}),
        ("zb_wave", {"M": 4, "w": 1}), ("zb_wave_odd", {"M": 4}),
    ],
    4: [
        ("interleaved_1f1b", {"M": 4, "v": 2}), ("zbv", {"M": 7}), ("dualpipe", {"M": 10}), ("dualpipev", {"M": 8}),
    ],
}  # fmt: skip
IN_PROCESS = [
    *[(name, {"P": 1, "M": m}) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zbh1", "zbv") for m in (1, 3)],
    ("dualpipev", {"P": 1, "M": 2}),
    ("1f1b", {"P": 3, "M": 4}),
    ("interleaved_1f1b", {"P": 2, "M": 4, "v": 3}),
    ("interleaved_1f1b", {"P": 4, "M": 4, "v": 2}),
    ("zbh1", {"P": 8, "M": 9}),
    ("zbv", {"P": 3, "M": 5}),
    ("dualpipe", {"P": 6, "M": 12}),
    ("dualpipev", {"P": 3, "M": 6}),
    ("dualpipev", {"P": 5, "M": 11}),
]


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("ranks", swept([*ON_PROCESSES], [4]))
def test_processes(ranks: int) -> None:
    cases = [(name, {"P": ranks, **sizes}) for name, sizes in ON_PROCESSES[ranks][swept(0, 1) :: swept(1, 2)]]
    everyone = pool(ranks).run("support.runtime_cases:parity", cases=cases, timeout=120)
    for number, case in enumerate(cases):
        model = model_for(compile_schedule(case[0], **case[1]))
        every_name = sorted(name for name, _ in model.named_parameters())
        # All parameters have been compared, by the rank (in DualPipe the two ranks) that holds them.
        assert sorted({name for rank in everyone for name in rank[number]}) == every_name, case


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "sizes"), thinned(IN_PROCESS, 4))
def test_in_process(schedule: str, sizes: dict[str, int]) -> None:
    program = compile_schedule(schedule, **sizes)
    model = model_for(program)
    example, _ = tokens(program.microbatches)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, example=example)
    assert check_parity(pipe, model, program.microbatches) == sorted(name for name, _ in model.named_parameters())


COLUMNS = ("kind", "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "channel", "message", "batch",
           "op", "phase", "span")  # fmt: skip


def _crossed(program: Program, channel: Channel) -> Program:
    """Microbatches 1 and 2 swapped where rank 1 (activations) or rank 0 (gradients) receives them.

    All receives are posted and awaited before the first use. Else the swap would be noticed as a missing value.
    """
    receiver = 1 if channel is Channel.ACTIVATION else 0
    arrivals = (program.rank == receiver) & (program.channel == channel)
    posts = np.flatnonzero(arrivals & (program.kind == InstructionKind.RECV))
    waits = np.flatnonzero(arrivals & (program.kind == InstructionKind.WAIT))
    place = np.arange(len(program), dtype=np.float64)
    place[posts] = program.rank_start[receiver] - 0.5
    place[waits] = waits[0]
    order = np.argsort(place, kind="stable")
    crossed = program.microbatch.copy()
    swap = {1: 2, 2: 1}
    for row in (*posts, *waits):
        crossed[row] = swap.get(int(crossed[row]), crossed[row])
    columns = {name: getattr(program, name)[order] for name in COLUMNS} | {"microbatch": crossed[order]}
    return replace(program, **columns)


def _dropped(program: Program, microbatch: int, kinds: tuple[InstructionKind, ...] = tuple(InstructionKind)) -> Program:
    keep = ~((program.microbatch == microbatch) & np.isin(program.kind, kinds))
    starts = np.concatenate([[0], np.cumsum(keep)])[program.rank_start]
    return replace(program, rank_start=starts, **{name: getattr(program, name)[keep] for name in COLUMNS})


def _doubled(program: Program) -> Program:
    """Microbatch 1 in the place of 2, everywhere."""
    return replace(program, microbatch=np.where(program.microbatch == 2, 1, program.microbatch).astype(np.int32))


@pytest.mark.parametrize("channel", Channel)
def test_swapped_microbatches_are_seen(channel: Channel) -> None:
    program = compile_schedule("gpipe", P=2, M=4)
    pipe = Pipeline(small_gpt(), _crossed(program, channel), loss_fn=next_token_loss, in_process=True)
    batch, targets = tokens(8)
    expected = oracle(pipe, batch, targets, program)
    wrong = differences(pipe, pipe.step(batch, targets), expected)
    # Crossed activations meet the wrong targets; crossed gradients spoil the first stages alone.
    assert any(name.startswith("loss") for name in wrong) == (channel is Channel.ACTIVATION)
    assert any(name.startswith("blocks.0.") for name in wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda p: _dropped(p, 2), "microbatches [2]"),
        (lambda p: _dropped(p, 2, (InstructionKind.B,)), "still holds microbatches [2]"),
        (_doubled, "forwarded again|before it is there"),
    ],
)
def test_a_dropped_or_doubled_microbatch_is_refused(mutate: Callable[[Program], Program], message: str) -> None:
    program = compile_schedule("1f1b", P=1, M=4)
    pipe = Pipeline(small_gpt(), mutate(program), loss_fn=next_token_loss, in_process=True)
    with pytest.raises(Exception, match=message.replace("[", "\\[")):
        pipe.step(*tokens(8))


def test_a_weight_gradient_left_out_is_seen() -> None:
    program = compile_schedule("zbh1", P=1, M=4)
    pipe = Pipeline(small_gpt(), _dropped(program, 2, (InstructionKind.W,)), loss_fn=next_token_loss, in_process=True)
    with pytest.raises(Exception, match=r"\[2\] \(no weight gradients yet\)"):
        pipe.step(*tokens(8))
