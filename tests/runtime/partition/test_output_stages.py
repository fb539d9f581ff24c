"""Losses in stages of their own, and predictions that the first stage embeds for: gradients of the one-stage loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.ir.program import InstructionKind
from schedc.plan.layout import parse_layout
from schedc_runtime import ChunkedLoss, Loss, Pipeline
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, losses_of_outputs
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.agree.batch import BatchRefused, split
from schedc_runtime.testing import pool
from support.runtime_cases import differences
from support.sweeps import in_sweeps, swept

EXPERTS = ("experts 4 top 2 shared 1",)
ROWS, TOKENS, VOCAB = 8, 6, 24
SIZES = {"vocab": VOCAB, "width": 16, "heads": 2, "inner": 24, "expert_inner": 8, "query_rank": 8,
         "key_value_rank": 4, "plain": 4, "rotary": 4}  # fmt: skip
HEAD, TABLE = "head.weight", "embedding.weight"

CASES = {
    "two heads": ("1f1b(P = 4, M = 4)", "Et|tm|L|L", 0),
    "one node, split": ("zbh1(P = 4, M = 4)", "Eet|t|mL|L", 0),
    "chunks": ("interleaved_1f1b(P = 2, M = 4, v = 2)", "Eet|tm|L|L", 0),
    "three heads": ("interleaved_1f1b(P = 2, M = 4, v = 3)", "Eet|t|m|mL|L|L", 0),
    "segments": ("zbh1(P = 4, M = 4)", "Eet|t|mL|L", 1),
    "cells": ("dualpipev(P = 2, M = 4)", "Et|tm|L|L", 1),
    "first embeds, one head": ("zbv(P = 2, M = 4)", "Eet|t|m|L", 1),
}
"""Schedule, layout, and how many of the two layers have experts."""


def written(folder: Path, schedule: str, layout: str, *lines: str) -> schedc.Program:
    path = folder / "plan.sched"
    path.write_text(f'plan p = {schedule} {{ layout "{layout}" {" ".join(lines)} }}\n')
    return schedc.compile(path)


def model_of(layout: str, experts: int) -> MoETransformer:
    torch.manual_seed(5)
    routing = RouterConfig(experts=4, top=2, scores="sigmoid", balance=1e-4)
    predictions, layers = layout.count("m"), layout.count("t")
    config = MoEConfig(**SIZES, dense_blocks=layers - experts, moe_blocks=experts, routing=routing,
                       predictions=predictions)  # fmt: skip
    return MoETransformer(config).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(2))
    return first, second


def pipeline(program: schedc.Program, layout: str, experts: int, **options: Any) -> Pipeline:
    losses = losses_of_outputs(layout.count("m"))
    return Pipeline(model_of(layout, experts), program, loss_fn=losses, timeout=60, **options)


def wrong_in(pipe: Pipeline, layout: str, experts: int, *, serial: bool = True) -> list[str]:
    """What differs from all losses in one stage by more than 1e-13, and from the ``serial`` reference by a bit."""
    batch, targets = data()
    pipe.step(batch, targets)
    pipe.zero_grad()
    loss, count = pipe.step(batch, targets), pipe.program.microbatches  # the second run is written out
    losses = losses_of_outputs(layout.count("m"))
    wrong = []
    if serial:
        microbatches = [((part,), {}) for part in split(batch, count, batch.device)]
        parts = split(targets, count, batch.device)
        wrong = differences(pipe, loss, reference_step(pipe.partition, pipe.program, microbatches, parts, losses))
    whole = schedc.compile("1f1b", P=1, M=count)
    single = Pipeline(model_of(layout, experts), whole, loss_fn=losses, in_process=True)
    if abs(single.step(batch, targets) - loss) > 1e-13:
        wrong.append("the loss of one stage")
    grads = {name: parameter.grad for name, parameter in single.named_parameters()}
    for name, parameter in pipe.named_parameters():
        own, other = parameter.grad, grads[name]
        if own is None or other is None or not torch.allclose(own, other, rtol=0.0, atol=1e-13):
            wrong.append(f"{name} of one stage")
    with torch.no_grad():
        if abs(pipe.evaluate(batch, targets) - loss) > 1e-12:
            wrong.append("the loss of an evaluation")
    pipe.close()
    return wrong


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*CASES], [*CASES][::4]))
def test_gradients_are_those_of_one_stage(name: str, tmp_path: Path) -> None:
    schedule, layout, experts = CASES[name]
    pipe = pipeline(written(tmp_path, schedule, layout, *EXPERTS[:experts]), layout, experts, in_process=True)
    heads = [stage for stage, parts in enumerate(layout.split("|")) if "L" in parts]
    assert pipe.partition.losses == tuple(heads)
    uses = {shared.name: shared.stages for shared in pipe.partition.shared}
    embeds = [0] + ([] if "e" in layout else [stage for stage, parts in enumerate(layout.split("|")) if "m" in parts])
    expected = {TABLE: tuple(embeds), HEAD: tuple(heads)}
    assert uses == {name: stages for name, stages in expected.items() if len(stages) > 1}
    assert wrong_in(pipe, layout, experts) == []


def test_a_state_more_crosses_where_the_first_stage_embeds() -> None:
    """[rows, tokens - 1, width] of the prediction, and the gradient of it, in place of the tokens."""
    state, shorter = (2, TOKENS, 16), (2, TOKENS - 1, 16)
    model = model_of("Ettm|L", 0)
    crossing = {}
    for text in ("Et|t|m|L|L", "Eet|t|m|L|L"):
        parts = partition(model_of("Ettm|L", 0), 5, layout=parse_layout(text), example=data()[0][:2])
        boundaries = parts.records.first.boundaries[1:-1]  # type: ignore[union-attr]
        crossing[text] = [[spec.shape for spec in boundary.tensors if spec.differentiable] for boundary in boundaries]
        assert [len(shapes) for shapes in crossing[text]] == list(parse_layout(text).crossing)
    assert crossing["Et|t|m|L|L"] == [[state], [state], [state, shorter], [shorter]]
    assert crossing["Eet|t|m|L|L"] == [[state, shorter], [state, shorter], [state, shorter], [shorter]]
    assert model.predictions[0].embedding is None


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("line", "experts", "M"), [("recompute full", 1, 4), *swept([("recompute full in bubbles", 0, 8)], [])]
)
def test_recomputation_before_an_early_loss(line: str, experts: int, M: int, tmp_path: Path) -> None:
    """By level, in segments; and by Rs of whole stages."""
    layout = "Eet|t|mL|L"
    program = written(tmp_path, f"1f1b(P = 4, M = {M})", layout, *EXPERTS[:experts], line)
    assert bool((program.kind == InstructionKind.R).any()) == line.endswith("bubbles")
    assert wrong_in(pipeline(program, layout, experts, in_process=True), layout, experts) == []


def on_ranks(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """[cases] names of wrong gradients in this rank's part. Run on processes."""
    wrong = []
    for name in ("two heads", "segments"):
        schedule, layout, experts = CASES[name]
        own = Path(folder) / f"{name} {rank}"
        own.mkdir()
        pipe = pipeline(written(own, schedule, layout, *EXPERTS[:experts]), layout, experts)
        wrong.append(wrong_in(pipe, layout, experts, serial=not experts))  # it needs the layers of all ranks
    return wrong


@in_sweeps("test_gradients_are_those_of_one_stage")
@pytest.mark.processes
def test_losses_of_several_processes(tmp_path: Path) -> None:
    assert pool(4).run("runtime.partition.test_output_stages:on_ranks", folder=str(tmp_path)) == [[[], []]] * 4


def one(output: Any, targets: Tensor) -> Tensor:
    return output[0].mean() + targets.sum() * 0.0


def counted(output: Tensor, targets: Tensor) -> Loss:
    return Loss(output.sum(), targets.numel())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (one, "the layout has 2 losses, and loss_fn is one function"),
        ((one, one, one), "the layout has 2 losses, and loss_fn is 3 functions"),
        ((), "loss_fn has no function"),
        ((one, ChunkedLoss("head")), "loss_fn is one of several, and a ChunkedLoss"),
        (ChunkedLoss("head"), "the layout has 2 losses, and loss_fn is one function"),
    ],
)
def test_loss_functions_that_do_not_fit(loss_fn: Any, message: str, tmp_path: Path) -> None:
    program = written(tmp_path, "1f1b(P = 4, M = 4)", "Et|tm|L|L")
    with pytest.raises(RuntimeFault, match=message):
        Pipeline(model_of("Ettm|L", 0), program, loss_fn=loss_fn, in_process=True)


@pytest.mark.slow
def test_what_several_losses_do_not_have(tmp_path: Path) -> None:
    layout = "Et|tm|L|L"
    program = written(tmp_path, "1f1b(P = 4, M = 4)", layout)
    pipe = pipeline(program, layout, 0, in_process=True)
    with pytest.raises(BatchRefused, match="outputs=True with 2 losses in stages of their own"):
        pipe.evaluate(*data(), outputs=True)
    pipe.close()
    counts = Pipeline(model_of(layout, 0), program, loss_fn=(counted, counted), in_process=True)
    with pytest.raises(InstructionError, match="the loss function of output 0 returned a `Loss`"):
        counts.step(*data())
    sliced = written(tmp_path, "dualpipev(P = 2, M = 4)", layout, *EXPERTS, "slices 2")
    with pytest.raises(RuntimeFault, match="2 losses in stages of their own, and microbatches in slices"):
        pipeline(sliced, layout, 1, in_process=True)


class OneOutput(nn.Module):
    """A model that returns a tensor, however many losses there are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|tm|L|L", "the layout has 2 losses, and the model returns one output"),
        (
            "Eet|t|m|L",
            "the layout has e, and the predictions of the model take nothing that the first stage could embed",
        ),
    ],
)
def test_models_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(OneOutput(), 4, layout=parse_layout(text), example=torch.zeros(2, 4))
