"""Steps with another number of microbatches: the bits of a pipeline built for it, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import schedc
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.execute import bind
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build import own_works
from schedc_runtime.pipeline.state import snapshots
from schedc_runtime.testing import pool
from support.runtime_cases import model_for, small_gpt, tokens
from support.sweeps import swept

SCHEDULES = {"1f1b": 4, "zbh1": 4, "interleaved_1f1b": 2, "dualpipev": 2, "dualpipe": 2}
"""Ranks of each."""


def pipeline(name: str, microbatches: int, replicas: int = 1, **given: Any) -> Pipeline:
    program = schedc.compile(name, P=SCHEDULES[name], M=microbatches)
    mesh = Mesh(SCHEDULES[name], data=replicas)
    return Pipeline(
        model_for(program, dropout=0.1), program, loss_fn=next_token_loss, in_process=True, mesh=mesh, **given
    )


def gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


OTHERS = [
    ("interleaved_1f1b", 1),
    ("zbh1", 2),
    ("dualpipe", 1),
    ("1f1b", 1),
    ("zbh1", 1),
    ("dualpipev", 1),
    ("dualpipe", 2),
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "replicas"), swept(OTHERS, OTHERS[:1]))
def test_a_step_of_another_number_has_the_bits_of_a_pipeline_built_for_it(name: str, replicas: int) -> None:
    pipe = pipeline(name, 12, replicas)
    for step, microbatches in enumerate((8, 12, 4, 8)):
        other = pipeline(name, microbatches, replicas)
        other.steps = step
        batch = tokens(2 * microbatches * replicas, seed=step)
        losses = pipe.step(*batch, microbatches=microbatches), other.step(*batch)
        assert torch.equal(*losses)
        mine, theirs = gradients(pipe), gradients(other)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        pipe.zero_grad()
        other.close()


@pytest.mark.slow
def test_a_number_is_compiled_and_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline("dualpipev", 8)
    counts = {"bind": 0, "works": 0, "pieces": 0}

    def counted(key: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[key] += 1
            return whole(*arguments, **keywords)

        return call

    monkeypatch.setattr("schedc_runtime.pipeline.build.bound.bind", counted("bind", bind.bind))
    monkeypatch.setattr(own_works, "placed_in", counted("works", own_works.placed_in))
    monkeypatch.setattr(snapshots, "place_snapshots", counted("pieces", snapshots.place_snapshots))
    for microbatches in (8, 4, 8, 4, 4):
        pipe.step(*tokens(2 * microbatches), microbatches=microbatches)
    assert counts == {"bind": 2 * 2, "works": 1, "pieces": 0}, "2 programs on 2 ranks; 8 is the pipeline's own"
    for microbatches in (8, 4, 8, 4):
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.step(*tokens(2 * microbatches), microbatches=microbatches, snapshot=True)
        copied = pipe.snapshot()
        assert copied.program.microbatches == microbatches
        assert all(torch.equal(copied.model[name], value) for name, value in before.items())
    assert (counts["bind"], counts["pieces"]) == (4 * 2, 2)


@pytest.mark.slow
def test_numbers_that_cannot_be_are_refused_with_the_next_that_can() -> None:
    pipe = pipeline("dualpipev", 8)
    with pytest.raises(BatchRefused, match=re.escape("cannot have 3 microbatches")) as refused:
        pipe.step(*tokens(6), microbatches=3)
    assert "the smallest M above 3 that works is 4" in refused.value.help
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(Exception, match="is no number of microbatches"):
            pipe.step(*tokens(8), microbatches=wrong)  # type: ignore[call-overload]
    with pipe.record_routing(), pytest.raises(BatchRefused, match="record_routing"):
        pipe.step(*tokens(8), microbatches=4)
    pipe.step(*tokens(8), microbatches=4)
    read = load_program(program_to_json(schedc.compile("1f1b", P=2, M=4)), "program.json")
    loaded = Pipeline(small_gpt(4), read, loss_fn=next_token_loss, in_process=True)
    loaded.step(*tokens(8), microbatches=4)
    with pytest.raises(BatchRefused, match="was read from a file"):
        loaded.step(*tokens(8), microbatches=2)


def ranks_differ(rank: int, world_size: int) -> list[str]:
    """Losses of steps whose numbers of microbatches are the same on all ranks, or not."""
    program = schedc.compile("zbh1", P=world_size, M=4)
    pipe = Pipeline(small_gpt(2), program, loss_fn=next_token_loss)
    told = []
    for mine in (2, 6 + 2 * rank, 8):
        try:
            told.append(f"{pipe.step(*tokens(2 * mine), microbatches=mine).item():.17g}")
        except BatchRefused as fault:
            told.append(fault.message)
    pipe.close()
    return told


@pytest.mark.processes
def test_ranks_agree_on_the_number() -> None:
    first, second = pool(2).run(f"{__name__}:ranks_differ")
    assert first == second
    assert first[1] == ("rank 0 calls step(scale=1.0, microbatches=6), rank 1 calls step(scale=1.0, microbatches=8)")
    alone = Pipeline(small_gpt(2), schedc.compile("zbh1", P=2, M=4), loss_fn=next_token_loss, in_process=True)
    expected = [f"{alone.step(*tokens(2 * n), microbatches=n).item():.17g}" for n in (2, 8)]
    assert [first[0], first[2]] == expected
