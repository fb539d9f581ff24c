"""Messages on the communicators of a program: the same bits, in one process and between processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import schedc
from schedc.ir.communicators import Ends, sends_of
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program
from schedc.ir.verify_program import verify_program
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.agree.agreement import fingerprint
from schedc_runtime.testing import pool
from support.runtime_cases import check_parity, gradients, model_for, next_token_loss, tokens


def crossed(ranks: int = 2) -> Program:
    """Messages alternate between two communicators, and the last rank receives every two of them in the other order.

    In one queue they would be taken for each other: they have one shape.
    """
    program = schedc.compile("gpipe", P=ranks, M=4)
    receives = np.flatnonzero((program.kind == InstructionKind.RECV) & (program.rank == ranks - 1))
    order = list(range(len(program)))
    for first, second in receives.reshape(-1, 2).tolist():
        order.remove(second)
        order.insert(order.index(first), second)
    columns = {name: getattr(program, name)[order] for name in ("kind", *EVERY_COLUMN)}
    numbers = np.arange(Ends.of(program).source.size, dtype=np.int32) % 2
    return replace(program, communicators=numbers, **columns)


@pytest.mark.slow
def test_receives_cross_on_two_communicators_of_one_process() -> None:
    program = crossed()
    assert verify_program(program) == []
    assert [f.code for f in verify_program(replace(program, communicators=program.communicators[:0]))] == ["S313"]
    model = model_for(program)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True)
    assert check_parity(pipe, model, 8) == sorted(name for name, _ in model.named_parameters())
    evaluation = pipe._runner.programs.of("evaluate", pipe.program.microbatches)
    assert verify_program(evaluation) == []
    microbatches = evaluation.microbatch[sends_of(evaluation)].tolist()
    of_microbatch = dict(zip(microbatches, evaluation.communicators.tolist(), strict=True))
    assert of_microbatch == {0: 0, 1: 1, 2: 0, 3: 1}


def test_ranks_compare_their_communicators() -> None:
    program = crossed()
    prints = [
        fingerprint(each, {}, [], [], {})["program"]
        for each in (program, crossed(), replace(program, communicators=program.communicators[::-1]))
    ]
    assert prints[0] == prints[1] != prints[2]


def groups_of(pipe: Pipeline) -> dict[int, list[int]]:
    """The processes of the groups that this rank has for communicators, by number."""
    (transport,) = pipe._assembly.network.transports.values()
    return {n: dist.get_process_group_ranks(each.group) for n, each in transport.communicators.items()}  # type: ignore[attr-defined]


def train(rank: int, world_size: int) -> Any:
    """A step whose messages have a communicator for each directed edge; the groups of this rank."""
    program = schedc.compile("1f1b", P=4, M=8)
    program = replace(program, communicators=Ends.of(program).assigned("edge"))
    model = model_for(program)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=30, example=tokens(8)[0])
    check_parity(pipe, model, 8)
    groups = groups_of(pipe)
    pipe.close()
    group = dist.new_group()
    with pytest.warns(UserWarning, match="has 6 communicators, and its messages share the group given"):
        pipe = Pipeline(model_for(program), program, loss_fn=next_token_loss, group=group, example=tokens(8)[0])
    assert groups_of(pipe) == {}
    pipe.close()
    with pytest.raises(RuntimeFault, match="need its communicators"):
        Pipeline(model_for(program), crossed(4), loss_fn=next_token_loss, group=group, example=tokens(8)[0])
    return groups


def train_replicas(rank: int, world_size: int) -> Any:
    """Two pipelines side by side whose receives cross; the same as with one communicator."""
    results = []
    for program in (crossed(), schedc.compile("gpipe", P=2, M=4)):
        model, mesh = model_for(program), Mesh(2, 1, 2)
        pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=30, example=tokens(8)[0], mesh=mesh)
        loss = pipe.step(*tokens(8, seed=rank % 2))
        grads = {name: grad.clone() for name, grad in gradients(pipe).items()}
        results.append((torch.stack([loss, pipe.evaluate(*tokens(8))]), grads, groups_of(pipe)))
        pipe.close()
    (losses, grads, groups), (expected, wanted, none) = results
    assert torch.equal(losses, expected)
    assert none == {}
    assert grads.keys() == wanted.keys()
    assert all(torch.equal(grads[name], wanted[name]) for name in grads)
    return groups


def both(rank: int, world_size: int) -> Any:
    return train(rank, world_size), train_replicas(rank, world_size)


@pytest.mark.processes
def test_groups_of_processes_carry_the_messages() -> None:
    """The first communicator of all ranks of a pipeline is its own group."""
    edges, replicas = zip(*pool(4).run("runtime.pipeline.test_communicators:both", timeout=120), strict=True)
    assert [sorted(map(tuple, groups.values())) for groups in edges] == [
        [(0, 1)] * 2, [(0, 1)] * 2 + [(1, 2)] * 2, [(1, 2)] * 2 + [(2, 3)] * 2, [(2, 3)] * 2,
    ]  # fmt: skip
    assert [list(groups.values()) for groups in replicas] == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]
