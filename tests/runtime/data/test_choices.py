"""Steps whose program and order of microbatches are chosen: by the loader, on real ranks, and where ranks disagree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import schedc
from schedc.ir.program import computation
from schedc.step.costs.costs import Costs
from schedc.step.row_order import order_microbatches
from schedc.step.timeline import simulate
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.data import ProgramChoices, RowCosts, RowLoader, Windows, pricer_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.testing import pool
from support import chosen_cases, row_cases
from support.sweeps import swept

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NAMES = ("dualpipev", "zbv", "vhalf")


def _programs(microbatches: int = 8) -> list[schedc.Program]:
    return [schedc.compile(name, P=2, M=microbatches) for name in NAMES]


@pytest.mark.sweep
@pytest.mark.parametrize("number", swept(range(len(chosen_cases.FAMILIES)), (0,)))
def test_a_chosen_program_has_the_bits_of_a_pipeline_of_its_own(number: int) -> None:
    cases, failed, figures = chosen_cases.chosen((number,))
    assert (failed, figures["bound_later"]) == ([], 0)
    assert figures["bound"] == len(chosen_cases.FAMILIES[number].names)
    assert cases > 0


def test_a_rank_that_chooses_otherwise_is_named() -> None:
    for said in pool(2).run("support.chosen_cases:disagreements", timeout=240, number=0):
        program, order, own, none, *_ = said
        assert "rank 0 calls step(scale=1.0, choice=1 (vhalf)), rank 1 calls step(scale=1.0, choice=2" in program
        assert "order of microbatches of step 3 has other values on rank 1 than on rank 0" in order
        assert "rank 1 calls step(scale=1.0, choice=0 (zbv))" in own
        assert "rank 1 calls step(scale=1.0)" in none
        assert said[-1] == said[-2], "a step after a disagreement has the bits of the one before"
        assert "`others`" in said[4]


def test_the_loader_chooses_for_replicas_alike() -> None:
    documents, lengths = row_cases.drawn_documents(6_000, 256, 2)
    windows, programs = Windows(32, 256, RowCosts.of_share(0.8, 256), seed=3), _programs()
    first, *others = programs
    loaders = [
        RowLoader(documents, lengths, windows, first, mesh=Mesh(2, data=4), replica=replica, others=others)
        for replica in (None, 2)
    ]
    whole, mine = loaders
    for _ in range(3):
        batch, own = (next(each)[0]["tokens"] for each in loaders)
        assert whole.choice is not None
        assert mine.choice is not None
        assert torch.equal(own, batch.reshape(4, 8, 256)[2])
        assert (mine.choice.number, *mine.choice.orders) == (whole.choice.number, whole.choice.orders[2])
        assert whole.choice.floor <= whole.choice.makespan
        assert whole.choice.makespan >= mine.choice.makespan
    for each in loaders:
        each.close()
    for refused in ({"ordered": False, "others": others}, {"tries": 100}):
        with pytest.raises(RuntimeFault, match="`others`"):
            RowLoader(documents, lengths, windows, first, mesh=Mesh(2, data=4), **refused)


def test_the_shortest_step_is_chosen_with_its_floor() -> None:
    programs, costs = _programs(), Costs(p2p=0.1)
    choices = ProgramChoices.of(programs, costs)
    rows = row_cases.costs_of_rows("bimodal", 8, 3)
    chosen = choices.choose(rows[None], [0])
    steps = []
    for program in programs:
        order = order_microbatches(rows, pricer_of(program, costs), 48)
        factors = Costs(p2p=0.1, microbatches=tuple((rows[order] / rows.mean()).tolist()))
        steps.append(simulate(computation(program)[0], factors).makespan)
    assert NAMES[chosen.number] == NAMES[int(np.argmin(steps))] == chosen.name
    assert chosen.makespan == pytest.approx(min(steps), rel=0.02)
    assert sorted(chosen.orders[0]) == list(range(8))
    assert f"{chosen.name} (program {chosen.number}): " in str(chosen)
    assert "of the floor" in str(chosen)
    equal = choices.choose(np.full((1, 8), 100), [0])
    assert equal.name == "zbv"
    assert equal.makespan / equal.floor < 1.05


def test_refuses_programs_that_cannot_share_a_pipeline() -> None:
    first, *others = _programs()
    model = chosen_cases.model_for(first)

    def build(*programs: schedc.Program) -> Pipeline:
        return Pipeline(model, first, loss_fn=chosen_cases.next_token_loss, in_process=True, others=programs)

    with pytest.raises(RuntimeFault, match="others is a tuple, not a list of compiled programs"):
        build("zbv")  # type: ignore[arg-type]
    looped = schedc.compile("looped_bfs", P=2, M=8, v=2)
    for wrong in (looped, schedc.compile("zbv", P=2, M=9)):
        with pytest.raises(RuntimeFault, match="cannot run in this pipeline: its stages or microbatches lie elsewhere"):
            build(wrong)
    with pytest.raises(RuntimeFault, match="8 other programs, 7 are the most"):
        build(*[others[0]] * 8)
    with pytest.raises(RuntimeFault, match="zbv has 2 ranks, 4 stages and 9 microbatches, dualpipev has 2, 4 and 8"):
        ProgramChoices.of([first, schedc.compile("zbv", P=2, M=9)], Costs())
    pipe, batch, choice = build(*others), chosen_cases.tokens(16), chosen_cases.choice_of(chosen_cases.FAMILIES[0], 1)
    with pytest.raises(BatchRefused, match="program 3 of 3"):
        pipe.step(*batch, choice=replace(choice, number=3))
    for number in (8, 4):  # one batch in different numbers of microbatches
        assert pipe.step(*batch, choice=replace(choice, number=0), microbatches=number).isfinite()
        assert pipe.step(*batch, microbatches=number).isfinite()
    with pytest.raises(RuntimeFault, match="choice=2 is no choice of a program"):
        pipe.step(*batch, choice=2)  # type: ignore[call-overload]
    with pytest.raises(BatchRefused, match="program 1 and 4 microbatches"):
        pipe.step(*batch, choice=choice, microbatches=4)
    pipe.close()
