"""Microbatches in slices: bits of a reference in slices, numbers of whole microbatches, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import schedc
from schedc.cell.serial import serial
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Recompute
from schedc.ir.program import Program
from schedc.load.library import InSlices
from schedc.plan import Capacity, Plan
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import PartitionError
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.partition.boundary import Boundary, SlicedBoundary, TensorSpec
from schedc_runtime.partition.example import arguments
from schedc_runtime.pipeline.agree.batch import BatchRefused, split
from schedc_runtime.random_numbers.numbering import StepKey
from schedc_runtime.stage.stage import Stage
from support.expert_cases import compiled, model
from support.offload_cases import Watch, moving
from support.runtime_cases import differences, next_token_loss, small_gpt, tokens
from support.segmented_cases import COSTS, shuffled
from support.sweeps import halved, swept

pytestmark = pytest.mark.slow

ROWS = 4
"""Rows of one microbatch."""


def in_process(program: Program, whole: nn.Module, **settings: Any) -> Pipeline:
    example, _ = tokens(ROWS * program.microbatches)
    return Pipeline(whole, program, loss_fn=next_token_loss, in_process=True, example=example, **settings)


def batch(pipe: Pipeline, seed: int = 1) -> tuple[Tensor, Tensor]:
    return tokens(ROWS * pipe.program.microbatches * pipe.mesh.replicas, seed=seed)


def results(pipe: Pipeline) -> dict[str, Tensor]:
    """Loss, gradients, and auxiliary losses of a step, by name."""
    loss = pipe.step(*batch(pipe))
    values = {"loss": loss.detach()}
    for place in pipe.places:
        for stage in pipe.held(place):
            name = f"{place} stage {stage.index}"
            values |= {f"{name} {own}": p.grad for own, p in stage.module.named_parameters() if p.grad is not None}
            for own, layer in moe_layers(stage.module):
                values[f"{name} {own} auxiliary"] = torch.tensor(layer.statistics.balance_loss, dtype=torch.float64)
                values[f"{name} {own} chosen"] = layer.loads.chosen.double()
    return values


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "sizes", "moves"),
    halved(
        [
            ("1f1b", {"P": 2, "M": 2}, True),
            ("zbh1", {"P": 2, "M": 2}, True),
            ("zbh1_overlap", {"P": 2, "M": 3}, False),
            ("dualpipev", {"P": 1, "M": 2}, True),
        ]
    ),
)
def test_dense_models_have_the_bits_of_a_reference_in_slices(schedule: str, sizes: dict[str, int], moves: bool) -> None:
    """With dropout: every slice draws by its own number, whatever the order inside the cell, and what moves."""
    program, watch = schedc.compile(InSlices(schedule, 2), **sizes), Watch()
    with moving() if moves else nullcontext(), watch():
        pipe = in_process(program, small_gpt(max(4, program.stages), dropout=0.1), cells=COSTS)
        loss = pipe.step(*batch(pipe))
    assert (watch.moved > 0, watch.stayed) == (moves, [])
    assert watch.released == watch.moved
    rows, targets = batch(pipe)
    count, cpu = program.microbatches, torch.device("cpu")
    parts = [arguments(part) for part in split(rows, count, cpu)]
    key = StepKey()
    slices, goals = (2,) * program.stages, split(targets, count, cpu)
    expected = reference_step(pipe.partition, program, parts, goals, next_token_loss, slices=slices, key=key)
    assert differences(pipe, loss, expected) == []
    for stage in (stage for place in pipe.places for stage in pipe.held(place)):
        assert stage.slices == 2
        assert stage.offload is None or stage.offload.offload.slices == 2  # which move together
    pipe.close()


CASES = [
    ("dualpipev", {"P": 1, "M": 2}, "experts 8 top 2  topology nodes 2 x 1  alltoall hierarchical", (2, 2)),
    ("zbh1_overlap", {"P": 2, "M": 2}, "experts 8 top 2  topology nodes 1 x 2  recompute layer", (2, 1)),
    ("1f1b", {"P": 2, "M": 2}, "experts 8 top 2  topology nodes 1 x 1  sizes bounded 1.25", (1, 4)),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "sizes", "lines", "slices"), swept(CASES, CASES[1:2]))
def test_models_with_experts_equal_whole_microbatches(
    schedule: str, sizes: dict[str, int], lines: str, slices: tuple[int, int]
) -> None:
    """Loss, gradients and auxiliary losses are those of whole microbatches to 1e-12; any order gives the same bits."""
    text = "  ".join(f"slices stage {stage} {count}" for stage, count in enumerate(slices))
    blocks = "3 dense 1"
    program, whole = (compiled(schedule, sizes, f"  {lines}  {more}", blocks) for more in (text, ""))
    expected = results(in_process(whole, model(blocks=3), cells=serial))
    orders = [serial] if "recompute" in lines else [serial, shuffled(3)]
    first, *others = (results(in_process(program, model(blocks=3), cells=order)) for order in orders)
    assert first.keys() == expected.keys()
    assert any(name.endswith("auxiliary") and value > 0 for name, value in expected.items())
    for name, value in first.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=lambda text, n=name: n + text)
    for other in others:
        assert [name for name, value in first.items() if not torch.equal(value, other[name])] == []


def test_evaluation_keeps_outputs_of_whole_microbatches() -> None:
    program = schedc.compile(InSlices("1f1b", 2), P=2, M=2)
    pipe, plain = (in_process(each, small_gpt(4)) for each in (program, schedc.compile("1f1b", P=2, M=2)))
    rows, targets = batch(pipe)
    torch.testing.assert_close(pipe.evaluate(rows, targets), plain.evaluate(rows, targets), rtol=1e-12, atol=1e-14)
    outputs = [each.evaluate(rows, outputs=True).outputs for each in (pipe, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-14)


def test_rows_that_do_not_divide_are_refused_before_anything_is_sent() -> None:
    pipe = in_process(schedc.compile(InSlices("1f1b", 3), P=2, M=2), small_gpt(4), cells=COSTS)
    with pytest.raises(BatchRefused, match="4 rows, which do not divide into the 3 slices of stage 0") as refused:
        pipe.step(*tokens(8))
    assert "a multiple of 3 rows, as 3: a batch of 6; of 4 rows `slices 2 or 4` can be made" in str(refused.value)
    pipe.step(*tokens(12))  # the pipeline is as it was


class Normed(nn.Module):
    """Blocks with batch norms."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.mean:
            return self.blocks[1](x) * x.mean()
        output: Tensor = self.blocks[1](x)
        return output


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_layers_that_mix_rows_are_refused_where_they_train() -> None:
    program = schedc.compile(InSlices("1f1b", 2), P=2, M=2)
    pipe = Pipeline(Normed().double(), program, loss_fn=_squares, in_process=True)
    rows = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(BatchRefused, match=r"`blocks.0.1` is a BatchNorm1d: its statistics are of all rows"):
        pipe.step(rows, rows)
    for place in pipe.places:
        for stage in pipe.held(place):
            stage.module.eval()
    pipe.step(rows, rows)  # statistics that stay as they are belong to no row
    pipe.close()


class Scaled(nn.Module):
    """Its second block takes a number that follows from a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scale = self.blocks[0].weight.mean()
        output: Tensor = self.blocks[1](x) * scale
        return output


def test_a_value_without_rows_between_stages_is_refused() -> None:
    program = schedc.compile(InSlices("1f1b", 2), P=2, M=2)
    pipe = Pipeline(Scaled().double(), program, loss_fn=_squares, in_process=True)
    rows = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(PartitionError, match="that depends on parameters leaves a stage in slices, and has no rows"):
        pipe.step(rows, rows)


def test_plans_made_in_python_are_checked() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    for plan, message in (
        (Plan(slices=(2, 2), capacity=Capacity(1.25)), "and a `capacity`"),
        (Plan(slices=(2, 0)), "stage 1: a microbatch in 0 slices"),
        (Plan(slices=(2,)), "slices of 1 stages, and the program has 2"),
    ):
        with pytest.raises(DiagnosticError, match=message):
            Pipeline(small_gpt(4), program, loss_fn=next_token_loss, in_process=True, plan=plan)


def test_boundaries_split_where_the_rows_are_and_add_gradients_of_what_is_shared() -> None:
    def boundary(rows: int) -> Boundary:
        shapes = (((rows, 3), True), ((5, rows), True), ((7,), True))
        specs = tuple(TensorSpec(shape, torch.float64, wanted) for shape, wanted in shapes)
        return Boundary(specs, pytree.tree_structure((0, 0, 0)), ("a", "b", "c"))

    both = SlicedBoundary.of(boundary(4), boundary(2), 2)
    assert both.dims == (0, 1, None)
    tensors = [torch.randn(spec.shape, dtype=spec.dtype) for spec in both.whole.tensors]
    parts = both.split(tensors)
    assert [tuple(part.shape) for part in parts[1]] == [(2, 3), (5, 2), (7,)]
    assert all(map(torch.equal, both.join(parts), tensors))
    joined = both.join_gradients(both.split_gradients(tensors))
    assert torch.equal(joined[2], tensors[2] + tensors[2])
    assert both.split_gradients([None, None, tensors[2]])[1][0] is None
    with pytest.raises(PartitionError, match=r"a float64\[4, 3\] of a microbatch"):
        SlicedBoundary.of(boundary(4), boundary(2), 4)


def test_slices_hold_as_many_bytes_as_whole_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    act = Stage.begin_backward

    def count(stage: Any, microbatch: int, *rest: Any) -> None:
        counted.append(held(stage, microbatch).total)
        act(stage, microbatch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "begin_backward", count)
        for slices in ((), (2,)):
            plan = Plan(overlap=True, slices=slices)
            pipe = in_process(schedc.compile("1f1b", P=1, M=1), small_gpt(2), plan=plan, cut=Cut(segmented=True))
            (stage,) = (stage for place in pipe.places for stage in pipe.held(place))
            stage.set_recomputation(Recompute(), count=True)
            pipe.step(*batch(pipe))
    assert len(counted) == 2
    assert 0.9 * counted[0] < counted[1] < 1.1 * counted[0]
