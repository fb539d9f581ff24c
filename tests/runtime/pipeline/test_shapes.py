"""Steps whose microbatches have several shapes: bits of serial autograd, what is bound once, and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import schedc
from schedc.ir.plan import Capacity, Fuse, Level, Recompute
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime import Audit, Cut, Mesh, Pipeline
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.build import bound
from schedc_runtime.testing import pool
from support.row_cases import summed
from support.runtime_cases import model_for, small_gpt, tokens
from support.segmented_cases import listed, shuffled, small_moe
from support.shape_cases import EQUAL, ListedBatch, counted_calls, differing, serial, shapes
from support.sweeps import in_sweeps, swept

pytestmark = pytest.mark.slow
THREE = (6, 9, 7)
OF_STAGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "cells": {"cut": Cut(segmented=True), "cells": listed},
    "recomputed layers": {"plan": Plan(recompute=(Recompute(Level.LAYER),) * 4)},
    "recomputed activations": {"plan": Plan(recompute=(Recompute(Level.ACT),) * 4), "cut": Cut(segmented=True)},
}
"""Options of a pipeline, by how its stages run a microbatch."""


class PlacedGPT(GPT):
    """Adds positions behind each block: all stages and segments have sizes of the batch in their code."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(places))
        for block in self.blocks:
            x = block(x) + torch.arange(tokens.shape[1], device=x.device)[:, None] / 100
        logits: Tensor = self.head(self.norm(x))
        return logits


def placed(program: Program) -> PlacedGPT:
    torch.manual_seed(0)
    config = GPTConfig(width=16, heads=2, blocks=max(4, program.stages), vocab=32, dropout=0.1)
    return PlacedGPT(config).double()


def pipeline(name: str, ranks: int = 2, microbatches: int = 8, **given: Any) -> Pipeline:
    program = schedc.compile(name, P=ranks, M=microbatches)
    model = given.pop("model", None) or model_for(program, dropout=0.1)
    return Pipeline(model, program, loss_fn=summed, **{"in_process": True, **given})


OF_LENGTHS = [
    *(("dualpipev", stages) for stages in OF_STAGES), *((name, "whole") for name in ("1f1b", "zbv", "dualpipe")),
    ("zbh1_overlap", "whole"), ("zbh1_overlap", "cells"), ("1f1b_overlap", "cells"),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "stages"), swept(OF_LENGTHS, OF_LENGTHS[:1]))
def test_a_step_of_three_lengths_has_the_bits_of_serial_autograd(schedule: str, stages: str) -> None:
    lengths, count = ((6, 9), 16) if schedule == "dualpipe" else (THREE, 8)  # copies of a stage share its code
    program = schedc.compile(schedule, P=2, M=count)
    model = placed(program) if stages == "cells" else model_for(program, dropout=0.1)
    twin = copy.deepcopy(model)
    pipe = pipeline(schedule, microbatches=count, model=model, **OF_STAGES[stages])
    for step, seed in enumerate((0, 1, 0)):
        batch = ListedBatch(lengths, seed, microbatches=count)
        pipe.step(*batch.given)
        other, apart = differing(pipe, serial(twin, [batch], step, drawn=True))
        assert apart <= EQUAL
        assert not other or schedule == "dualpipe", "its two copies of a stage add up in an order of their own"
        pipe.zero_grad()
    pipe.step(*tokens(8), microbatches=8)  # one shape again, and another number of microbatches
    pipe.step(*ListedBatch(THREE, 3, microbatches=4).given)
    pipe.close()


@in_sweeps(
    "test_a_step_of_three_lengths_has_the_bits_of_serial_autograd",
    "runtime/moe/test_moe_training.py::test_a_pipeline_trains_the_transformer_with_the_bits_of_the_reference",
)
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "experts", "cells"),
    [
        pytest.param("dualpipev", 2, listed, id="shared"),
        *swept(
            [
                pytest.param("1f1b_overlap", 1, shuffled(1), id="halves on one stage"),
                pytest.param("dualpipev", 1, listed, id="dualpipev"),
            ],
            [],
        ),
    ],
)
def test_experts_run_microbatches_of_several_lengths(schedule: str, experts: int, cells: CellSource) -> None:
    model = small_moe(3, 1)
    twin = copy.deepcopy(model)
    pipe = pipeline(schedule, model=model, mesh=Mesh(2, experts, 1), cells=cells, plan=Plan(overlap=True))
    for seed in (5, 6):
        batches = [ListedBatch(THREE, seed, replica, microbatches=8) for replica in range(experts)]
        pipe.step(*[[part for batch in batches for part in batch.given[place]] for place in (0, 1)])
        expected = serial(twin, batches, drawn=False)
        largest = max(float(grad.abs().max()) for grad in expected.values())
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        own = {name: grad for name, grad in grads.items() if grad.shape == expected[name].shape}
        assert len(own) > 20, "all but the gradients of experts that ranks share"
        for name, grad in own.items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=EQUAL * largest)
        pipe.zero_grad()
        pipe.step(*tokens(8 * experts, 8))  # stages are bound to one shape in between
        pipe.zero_grad()
    pipe.close()


def test_shapes_are_recorded_and_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline("zbh1")
    records = pipe.partition.records
    with counted_calls(bound, "bind") as binds:
        seen = []
        for lengths, seed in (((6, 9), 0), ((6, 9), 1), ((9, 12), 0), ((6, 9, 12), 2)):
            pipe.step(*ListedBatch(lengths, seed, microbatches=8).given)
            seen.append((len(binds), records.recordings))
        assert {number for number, _ in seen} == {2}, "a stream for each rank, for all shapes"
        assert seen[1] == seen[0] == seen[2] == seen[3], "further lengths follow from a recording with symbols"
        pipe.step(*ListedBatch((9,), 0, microbatches=8).given)
        whole = len(binds)
        pipe.step(*tokens(16, 9))
        assert (whole, len(binds)) == (4, 4), "a list of one shape runs the stream of a whole batch"
    pipe.close()


def test_packed_rows_and_keywords_have_several_lengths() -> None:
    pipe = pipeline("zbh1", microbatches=4, model=small_gpt(4))
    batch, twin = ListedBatch(THREE, 3, microbatches=4), small_gpt(4)
    rows, targets = batch.given
    documents = [torch.arange(each.shape[1]).expand_as(each).div(4, rounding_mode="floor").int() for each in rows]
    named = [{"tokens": each, "documents": own} for each, own in zip(rows, documents, strict=True)]
    losses = [summed(twin(*each), own) for each, own in zip(zip(rows, documents, strict=True), targets, strict=True)]
    (torch.stack([loss.sum for loss in losses]).sum() / sum(int(loss.count) for loss in losses)).backward()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    for given in (list(zip(rows, documents, strict=True)), named):
        pipe.step(given, targets)
        assert differing(pipe, expected)[1] <= EQUAL
        pipe.zero_grad()
    pipe.close()


def test_evaluations_take_lists_and_numbers_of_microbatches() -> None:
    pipe = pipeline("zbh1", model=small_gpt(4))
    twin = small_gpt(4).eval()
    batch = ListedBatch(THREE, 7, microbatches=4)
    result = pipe.evaluate(*batch.given, outputs=True)
    expected = [twin(rows) for rows, _ in batch.parts]
    assert all(torch.equal(own, wanted) for own, wanted in zip(result.outputs, expected, strict=True))
    losses = [summed(own, targets) for own, (_, targets) in zip(expected, batch.parts, strict=True)]
    total = sum(loss.sum for loss in losses) / sum(int(loss.count) for loss in losses)
    torch.testing.assert_close(result.loss, total, rtol=1e-14, atol=0)
    assert result.microbatches == (0, 1, 2, 3)
    with pytest.raises(BatchRefused, match="may be microbatches or positional arguments"):
        pipe.evaluate(batch.given[0], outputs=True)
    alone = pipe.evaluate(batch.given[0], outputs=True, microbatches=4)
    assert torch.isnan(alone.loss)
    assert torch.equal(alone.outputs[3], expected[3])
    whole = tokens(12)
    outputs = pipe.evaluate(*whole, outputs=True, microbatches=6)
    assert (len(outputs.losses), outputs.outputs.shape[0]) == (6, 12)
    assert torch.equal(outputs.outputs, torch.cat([twin(part) for part in whole[0].chunk(6)]))
    pipe.close()


def lists(*lengths: int) -> tuple[list[Tensor], list[Tensor]]:
    batch, targets = zip(*[tokens(2, length, seed) for seed, length in enumerate(lengths)], strict=True)
    return list(batch), list(targets)


def test_lists_that_do_not_fit_are_refused() -> None:
    pipe = pipeline("1f1b", microbatches=4)
    batch, targets = lists(6, 7, 6, 7)
    many = lists(*range(6, 15))
    refused: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("9 shapes of microbatches in one step, of which 8 is the most", *many, {}),
        ("the batch is a list of microbatches, and the targets are no list", batch, torch.cat([targets[0]] * 4), {}),
        ("the targets are a list of microbatches, and the batch is no list", torch.cat([batch[0]] * 4), targets, {}),
        ("the batch has 4 microbatches, and the targets have 3", batch, targets[:3], {}),
        ("a list of 0 microbatches", [], [], {}),
        ("batch[1] is None", [batch[0], None, *batch[2:]], targets, {}),
        ("microbatches=3, and a list of 4 microbatches", batch, targets, {"microbatches": 3}),
        ("batch[0] and batch[2] differ in more than sizes", [*batch[:2], batch[2].int(), batch[3]], targets, {}),
        ("batch[1] (int64[2, 7]) and targets[1] (int64[1, 7]) differ in their first", batch,
         [targets[0], targets[1][:1], *targets[2:]], {}),
    ]  # fmt: skip
    for message, rows, wanted, options in refused:
        with pytest.raises(BatchRefused, match=re.escape(message)):
            pipe.step(rows, wanted, **options)
    pipe.step(batch, targets, microbatches=4)
    with pipe.record_routing(), pytest.raises(BatchRefused, match=re.escape("record_routing")):
        pipe.step(batch, targets)
    pipe.close()
    pair = pipeline("1f1b", microbatches=4, mesh=Mesh(2, data=2))
    with pytest.raises(BatchRefused, match=re.escape("microbatch 1 is int64[2, 7] in replica 0 and int64[2, 6] in")):
        pair.step(*lists(6, 7, 6, 7, 6, 6, 7, 7))
    with pytest.raises(BatchRefused, match=re.escape("a list of 3 microbatches for 2 replicas")):
        pair.step(*lists(6, 7, 6))
    pair.close()


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("`Cut(graphs=...)`", {"cut": Cut(graphs="step")}),
        ("`compile=`", {"compile": {"backend": "aot_eager"}}),
        ("`fuse`", {"plan": Plan(fuse=Fuse(("gelu_erf",)))}),
        ("`recompute adaptive`", {"plan": Plan(recompute=(Recompute(Level.FULL, 2.0),) * 2)}),
        ("`tokens`", {"plan": Plan(tokens=12)}),
        ("`capacity`", {"plan": Plan(capacity=Capacity(2.0)), "model": small_moe}),
        ("`slices`", {"plan": Plan(slices=(2, 2))}),
    ],
)
def test_what_takes_microbatches_for_alike_is_refused_beside_several_shapes(what: str, options: Any) -> None:
    if "model" in options:
        options = {**options, "model": options["model"](3, 1)}
    pipe = pipeline("1f1b", microbatches=4, **options)
    with pytest.raises(BatchRefused, match=re.escape(what)):
        pipe.step(*lists(6, 7, 6, 7))
    if what in ("`tokens`", "`recompute adaptive`"):
        pipe.step(*lists(6, 6, 6, 6))
    pipe.close()


def test_audited_pipelines_take_whole_batches() -> None:
    pipe = pipeline("dualpipe", microbatches=4, audit=Audit(every=1))
    with pytest.raises(BatchRefused, match="an audit repeats"):
        pipe.step(*lists(6, 7, 6, 7))


def ranks_differ(rank: int, world_size: int) -> list[str]:
    """Losses of steps, and refusals, where ranks are given the same shapes, or not."""
    pipe = pipeline("1f1b", microbatches=4, in_process=False)
    told = []
    for own in ((6, 7, 6, 7), (6, 7, 6, 7 + rank), (6, 7, 6, 7)[: 4 - rank], (7, 7, 6, 6)):
        batch, targets = lists(*own)
        try:
            told.append(f"{pipe.step(batch, targets).item():.17g}")
        except BatchRefused as fault:
            told.append(fault.message)
    batch, targets = lists(6, 9, 6, 9)  # a rank without a first stage needs no batch
    told.append(f"{pipe.step(batch if rank == 0 else None, targets if rank else None).item():.17g}")
    pipe.close()
    return told


@pytest.mark.processes
def test_ranks_agree_on_the_shape_of_each_microbatch() -> None:
    first, second = pool(2).run(f"{__name__}:ranks_differ")
    assert first == second
    assert first[1] == "rank 0 and rank 1 were given a different batch[3]: int64[2, 7] and int64[2, 8]"
    assert "microbatches of int64[2, 6], int64[2, 7] and 3 microbatches" in first[2]
    alone = pipeline("1f1b", microbatches=4)
    expected = []
    for step, lengths in enumerate(((6, 7, 6, 7), (7, 7, 6, 6), (6, 9, 6, 9))):
        alone.steps = step
        expected.append(f"{alone.step(*lists(*lengths)).item():.17g}")
    assert [first[0], first[3], first[4]] == expected


@pytest.mark.processes
def test_lengths_on_real_ranks_send_no_padding_and_bind_once() -> None:
    cases, failed, figures = shapes(("dualpipev",), (2,))
    assert (cases, failed, figures["bound_again"]) == (6, [], 0)
    assert figures["padding"] <= EQUAL
    assert figures["sent"] < 0.8
