"""`F & W` and `I & W` as cells: the bits of their ops one after the other, in any legal order inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedc.cell.serial import serial
from schedc.cell.verify import verify_cell
from schedc.ir.program import InstructionKind, Program
from schedc.step.program.insert_communication import insert_communication
from schedc_runtime import Cut, Pipeline
from schedc_runtime.ranks.mesh import Mesh
from support.runtime_cases import differences, next_token_loss, oracle, small_gpt, tokens
from support.segmented_cases import listed, shuffled, small_moe, together, unequal
from support.sweeps import halved
from support.weight_pairs import schedule_of_pairs

pytestmark = pytest.mark.slow

KINDS = ("FW", "IW")


def program_of(kind: str, P: int = 2, paired: bool = True) -> Program:
    schedule = schedule_of_pairs(kind, P, M=3)
    if not paired:
        schedule = replace(schedule, pair=np.full(len(schedule), -1, np.int32))
    return insert_communication(schedule)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", halved(KINDS))
def test_pairs_in_any_order_inside_give_the_bits_of_single_ops(kind: str) -> None:
    mesh = Mesh(1, experts=2)
    paired, single = program_of(kind, P=1), program_of(kind, P=1, paired=False)
    assert (paired.kind == InstructionKind.CELL).sum() == 2
    results = []
    for program, cells in ((single, serial), (paired, serial), (paired, listed), (paired, shuffled(1))):
        ranks = together(mesh, small_moe(), program, cells)
        ranks.step()
        results.append(ranks.results())
    for other in results[1:]:
        assert [unequal(other[place], results[0][place]) for place in other] == [[]] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", halved(["moe", "dense", "whole"]))
def test_pairs_train_as_the_serial_reference(kind: str, model: str) -> None:
    """Cut at exchanges, cut at blocks, and without segments, where both ops run one after the other."""
    program = program_of(kind)
    module: Any = small_moe(3, 1) if model == "moe" else small_gpt(4)
    batch, targets = tokens(program.microbatches)
    cut = Cut(segmented=model == "dense")
    pipe = Pipeline(module, program, loss_fn=next_token_loss, in_process=True, cells=listed, cut=cut, example=batch)
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []
    pipe.close()


def test_the_cells_of_a_pair_are_whole() -> None:
    shape = small_shape()
    for kind in KINDS:
        for source in (serial, listed, shuffled(2)):
            assert verify_cell(source(kind, shape, shape), shape, shape) == []


def small_shape() -> Any:
    ranks = together(Mesh(1, experts=2), small_moe(2), program_on_one_rank(), listed)
    return next(iter(ranks.stages.values()))[0].shape


def program_on_one_rank() -> Program:
    return insert_communication(schedule_of_pairs("FW", P=1, M=3))
