"""Layouts executed: the blocks that a layout names, and gradients equal to the serial reference, whatever is empty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schedc.compiler import compile as compile_schedule
from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.placement import loop
from schedc.plan.layout import Model, balance, even, padded, parse_layout
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.testing import pool
from support.runtime_cases import check_parity, next_token_loss, small_gpt, tokens
from support.sweeps import halved, thinned

LAYOUTS = {
    "padded at the end": "E tt|t|t|t noop L",
    "padded at the start": "E noop noop|t noop|tt|ttL",
    "uneven": "Ett|t|t|tL",
    "empty stages": "E||t*5|L",
    "empty in the middle": "Ett||noop|t*3L",
}
SCHEDULES = {"interleaved_1f1b": {"P": 2, "M": 4, "v": 2}, "dualpipev": {"P": 2, "M": 5}, "zbv": {"P": 2, "M": 4}}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(SCHEDULES))
@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_parity(schedule: str, text: str) -> None:
    program, layout = compile_schedule(schedule, **SCHEDULES[schedule]), parse_layout(text)
    model = small_gpt(blocks=5)
    names = sorted(model.state_dict())
    example, _ = tokens(2 * program.microbatches)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, cut=Cut(layers=layout), in_process=True, example=example)
    assert check_parity(pipe, model, 2 * program.microbatches) == sorted(name for name, _ in model.named_parameters())
    assert sorted(pipe.state_dict()) == names
    for stage in range(4):
        assert pipe.partition.blocks[stage] == tuple(f"blocks.{number}" for number in layout.layers_of(stage))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    halved(
        [
            "plan a = interleaved_1f1b(P = 2, M = 4, v = 2) { layers 6 mtp 1 pad 2 at auto  costs embedding 1 head 2 }",
            'plan a = dualpipev(P = 2, M = 5) { layout "Ettt||noop|t*4L" }',
            "plan a = zbv(P = 2, M = 4) { layers 7 pad 1 at [0] }",
        ]
    ),
)
def test_a_plan_is_executed_without_being_told_again(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "a.sched"
    path.write_text(plan, encoding="utf-8")
    program = load_program(program_to_json(compile_schedule(path)), "program.json")
    model = small_gpt(blocks=7)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True)
    assert check_parity(pipe, model, 2 * program.microbatches) == sorted(name for name, _ in model.named_parameters())
    layout = parse_layout(program.layout)
    of_stages = [
        len(stage) - sum(part.kind in ("noop", "embedding", "head") for part in stage) for stage in layout.stages
    ]
    assert [len(held) for held in pipe.partition.blocks] == of_stages
    even_pipe = Pipeline(
        small_gpt(blocks=7), program, loss_fn=next_token_loss, cut=Cut(layers=even(Model(7), 4)), in_process=True
    )
    assert [len(held) for held in even_pipe.partition.blocks] == [2, 2, 2, 1]


def test_a_program_whose_layout_is_none_of_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "a.sched"
    path.write_text("plan a = 1f1b(P = 2, M = 2) { layers 4 }", encoding="utf-8")
    program = replace(compile_schedule(path), layers=5)
    with pytest.raises(DiagnosticError, match="4 decoder layers, the model has 5"):
        Pipeline(small_gpt(blocks=4), program, loss_fn=next_token_loss, in_process=True)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", thinned(["dualpipev", "zbv", "zbh1"], 3))
def test_a_frozen_or_empty_first_stage_under_a_split_backward(schedule: str) -> None:
    """The first stage has no block, and a frozen embedding: nothing there wants a gradient, all else gets its own."""
    program = compile_schedule(schedule, P=2, M=5)
    model = small_gpt(blocks=5)
    for embedding in (model.token_embedding, model.position_embedding):
        embedding.requires_grad_(False)
    text = "E|t*5L" if program.stages == 2 else "E|tt|t|ttL"
    pipe = Pipeline(model, program, loss_fn=next_token_loss, cut=Cut(layers=parse_layout(text)), in_process=True)
    trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert check_parity(pipe, model, 2 * program.microbatches) == trained  # names with a gradient
    assert not any("embedding" in name for name in trained)


@pytest.mark.slow
def test_padding_changes_neither_names_nor_values() -> None:
    """Four places of a stage, one to three of them empty; 61 layers on 16 stages as the published case has them."""
    published, small = Model(61), Model(13)
    for layout in (padded(published, 16, 3, [0, 31, 63]), padded(small, 4, 3), even(small, 4),
                   balance(small, loop(2, 2, 2), pad=3).layout):  # fmt: skip
        blocks, stages = (61, 16) if len(layout.stages) == 16 else (13, 4)
        model = small_gpt(blocks)
        expected = model(tokens(2)[0])
        parts = partition(model, stages, layout=layout)
        assert [name for held in parts.blocks for name in held] == [f"blocks.{number}" for number in range(blocks)]
        assert [len(held) for held in parts.blocks] == [len(layout.layers_of(stage)) for stage in range(stages)]
        assert sorted(name for module in parts.modules for name in module.state_dict()) == sorted(model.state_dict())
        infer_boundaries(parts, (tokens(2)[0],))
        values: object = (tokens(2)[0],)
        for module in parts.modules:
            values = module(*values)  # type: ignore[misc]
        assert torch.equal(values, expected)  # type: ignore[arg-type]


def different_layouts(rank: int, world_size: int) -> str:
    """Rank 1 has one block more in its stage: run on processes."""
    program = compile_schedule("1f1b", P=2, M=2)
    layout = parse_layout("Ett|ttL" if rank else "Et|tttL")
    try:
        Pipeline(small_gpt(blocks=4), program, loss_fn=next_token_loss, cut=Cut(layers=layout), timeout=20)
    except RuntimeFault as error:
        return str(error).partition("\n")[0]
    return "built"


@pytest.mark.processes
def test_all_ranks_must_have_the_same_layout() -> None:
    told = pool(2).run("runtime.partition.test_layout_runtime:different_layouts")
    assert told == ["rank 0 and rank 1 differ in their layout of blocks on stages"] * 2


@pytest.mark.parametrize(
    ("text", "stages", "costs", "message"),
    [
        ("Ett|ttL", 3, None, "the layout has 2 stages, 3 are asked for"),
        ("Ett|tL", 2, None, "the layout has 3 layers and 0 multi-token predictions, the model has 4 blocks"),
        ("Ett|ttL", 2, [1, 1, 1, 1], "a layout beside costs or split points"),
    ],
)
def test_a_layout_that_does_not_fit_the_model(text: str, stages: int, costs: list[float] | None, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(small_gpt(blocks=4), stages, costs=costs, layout=parse_layout(text))


def test_predictions_are_the_blocks_after_the_layers() -> None:
    parts = partition(small_gpt(blocks=5), 4, layout=parse_layout("Ett|tt|m|L"))
    assert [len(held) for held in parts.blocks] == [2, 2, 1, 0]
