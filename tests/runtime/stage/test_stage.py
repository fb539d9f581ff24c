"""Stages and the serial reference: any order of F, B, I and W gives the gradients of the whole model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedc
from runtime.stage.stage_cases import (
    TOKENS,
    VOCAB,
    WIDTH,
    assert_close,
    assert_equal,
    autograd,
    backward,
    batches,
    forward,
    full,
    gpt,
    make_stages,
    split,
    take_grads,
    written,
)
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.program import InstructionKind, Program
from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.parity.reference import _serial, mean_loss, reference_step
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import BoundaryError


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_full_and_split_backwards_have_the_bits_of_autograd(count: int) -> None:
    model = gpt()
    inputs, targets = batches(3)
    expected = autograd(copy.deepcopy(model), [(x,) for x in inputs], targets, next_token_loss)
    expected_loss = sum(next_token_loss(model(x), y) for x, y in zip(inputs, targets, strict=True)) / 3
    stages = make_stages(partition(model, count), next_token_loss, inputs[0])
    for run in (full, split):
        for m in range(3):
            forward(stages, m, (inputs[m],), targets[m], 1 / 3)
            run(stages, m)
        assert_equal(take_grads(model), expected)
        torch.testing.assert_close(mean_loss(stages[-1].take_losses()), expected_loss)


def cell_program() -> Program:
    """One rank, two stages, two microbatches, with a cell and a weight gradient that comes out of order."""
    rows = [("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("CELL", 1, 1, 1, 0), ("I", 1, 1), ("I", 0, 0), ("I", 0, 1)]
    rows += [("W", 1, 1), ("W", 1, 0), ("W", 0, 0), ("W", 0, 1)]
    table = np.array([(InstructionKind[kind], *(*rest, -1, -1)[:4]) for kind, *rest in rows], np.int32).T
    none = np.full(len(rows), -1, np.int32)
    backward = np.where(table[0] == InstructionKind.CELL, OpKind.I, -1).astype(np.int8)
    placement = Placement(np.zeros((1, 2), np.int32), (0, 2), 1)
    return Program(
        "cells", {}, placement, np.array([0, len(rows)]), table[0].astype(np.int8), *table[1:], backward,
        none, none.astype(np.int8), none, none, none, np.zeros_like(none), np.zeros_like(none),
    )  # fmt: skip


def test_the_reference_follows_the_orders_of_the_program() -> None:
    model = gpt()
    inputs, targets = batches(2)
    parts = partition(model, 2)
    batch = [((x,), {}) for x in inputs]
    expected = autograd(copy.deepcopy(model), [(x,) for x in inputs], targets, next_token_loss)
    in_order = reference_step(parts, None, batch, targets, next_token_loss)
    assert_equal(in_order.grads, expected)
    order = [(work.kind.name, work.stage, work.microbatch) for work in _serial(cell_program(), 2, 2)]
    assert order[:5] == [("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("F", 1, 1), ("I", 1, 0)]
    assert order[-4:] == [("W", 1, 1), ("W", 1, 0), ("W", 0, 0), ("W", 0, 1)]
    shuffled = reference_step(parts, cell_program(), batch, targets, next_token_loss)
    assert torch.equal(shuffled.loss, in_order.loss)
    assert_close(shuffled.grads, expected)
    assert not take_grads(model)
    with pytest.raises(RuntimeFault, match=r"for 2 microbatches and 2 stages.* 1 microbatches and 2 stages"):
        reference_step(parts, cell_program(), batch[:1], targets[:1], next_token_loss)


def test_microbatches_interleave_freely() -> None:
    model = gpt()
    inputs, targets = batches(4)
    expected = autograd(copy.deepcopy(model), [(x,) for x in inputs], targets, next_token_loss)
    stages = make_stages(partition(model, 3), next_token_loss, inputs[0])
    for op in [
        "F0",
        "F1",
        "I0",
        "F2",
        "I1",
        "W0",
        "B2",
        "F3",
        "W1",
        "B3",
    ]:
        m = int(op[1])
        if op[0] == "F":
            forward(stages, m, (inputs[m],), targets[m], 1 / 4)
        elif op[0] == "W":
            for stage in stages:
                stage.weight(m)
        else:
            backward(stages, m, defer=op[0] == "I")
    assert_close(take_grads(model), expected)
    for stage in stages:
        stage.check_empty()


def test_the_reference_adds_the_two_copies_of_a_bidirectional_schedule() -> None:
    model = gpt()
    inputs, targets = batches(4)
    program = schedc.compile("dualpipe", P=2, M=4)
    step = reference_step(partition(model, 2), program, [((x,), {}) for x in inputs], targets, next_token_loss)
    halves = []
    for half in (slice(0, 2), slice(2, 4)):
        for x, y in zip(inputs[half], targets[half], strict=True):
            (next_token_loss(model(x), y) / 4).backward()
        halves.append(take_grads(model))
    assert_equal(step.grads, {name: grad + halves[1][name] for name, grad in halves[0].items()})


class Wide(nn.Module):
    """Several values per boundary: a skip, an integer, a float that no parameter touches, a value passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Two() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
        first = self.embed(tokens)
        x, side = self.blocks[0](first, first, bias)
        x, side = self.blocks[1](x, side, bias)
        x, side = self.blocks[2](x, first, bias)
        return self.head(x + side) + tokens.unsqueeze(-1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(x)) + bias, side


class Residual(nn.Module):
    """A chain of parameterless and small layers around an embedding."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


def matrices(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]


def plain() -> nn.Module:
    return Residual(linear(), linear(), linear())


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return (torch.sin(output) * target.unsqueeze(-1)).mean()


# name: model, stages, costs of the blocks
CASES: dict[str, tuple[Callable[[], nn.Module], int, list[float] | None]] = {
    "several values per boundary": (Wide, 3, [1, 1, 1]),
    "stages without parameters": (lambda: Residual(linear(), nn.Tanh(), nn.Dropout(0.0), linear()), 4, [1, 1, 1, 1]),
    "empty stages": (plain, 6, [1, 1, 1]),
    "an empty first stage": (lambda: nn.Sequential(*plain().layers), 3, [1, 1, 1]),
    "a first stage without blocks": (plain, 2, [9, 1, 1, 1, 1]),
    "a frozen first stage": (lambda: freeze(plain(), "embed", "layers.0"), 3, [1, 1, 1]),
    "a frozen stage between": (lambda: freeze(plain(), "layers.1"), 3, [1, 1, 1]),
    "a frozen last stage": (lambda: freeze(plain(), "layers.2", "head"), 3, [1, 1, 1]),
    "only norms and biases learn": (
        lambda: freeze(gpt(), *[n for n, p in gpt().named_parameters() if p.dim() > 1]),
        3,
        None,
    ),
    "tied weights in one stage": (lambda: gpt(tied=True), 1, None),
    "an output that is the input": (
        lambda: Residual(linear(), nn.Identity(), nn.Identity(), linear()),
        4,
        [1, 1, 1, 1],
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stage 0 holds no parameters:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_cases_others_get_wrong(name: str) -> None:
    make, count, costs = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    tokens, targets = batches(3)
    inputs: list[tuple[Tensor, ...]] = [(x,) for x in tokens]
    if isinstance(model, Wide):
        inputs = [(x, torch.randn(2, TOKENS, 1).double()) for x in tokens]
    if isinstance(model, nn.Sequential):
        inputs = [(torch.randn(2, TOKENS, WIDTH).double(),) for _ in tokens]
    expected = autograd(copy.deepcopy(model), inputs, targets, weighted)
    points = ["0", "2"] if name == "an empty first stage" else None
    parts = partition(model, count, costs=costs, split_points=points)
    stages = make_stages(parts, weighted, *inputs[0])
    results = []
    for run in (full, split, written, written):  # after a split backward forwards take marks
        if run is written:
            run(stages, inputs, targets, 1 / 3)
        else:
            for m, args in enumerate(inputs):
                forward(stages, m, args, targets[m], 1 / 3)
            for m in range(3):
                run(stages, m)
        results.append(take_grads(model))
        for stage in stages:
            stage.check_empty()
    assert [stage._written is not None for stage in stages] == [True] * count
    for others in results[1:]:
        assert_equal(results[0], others)
    assert_close(results[0], expected)


def test_a_gradient_that_nothing_needs_is_zero_and_has_its_shape() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach() * 2

    model = Residual(linear(), Cut()).double()
    tokens, targets = batches(1)
    stages = make_stages(partition(model, 2, costs=[1, 1]), next_token_loss, tokens[0])
    for backwards in ([stage.backward for stage in stages], [stage.calls_of_run().B for stage in stages]):
        forward(stages, 0, (tokens[0],), targets[0], 1.0)
        (grad,) = backwards[1](0, ())
        assert grad.shape == (2, TOKENS, WIDTH)
        assert not grad.any()
        assert backwards[0](0, (grad,)) == ()


def test_evaluation_keeps_nothing_and_switches_dropout_off() -> None:
    model = gpt(dropout=0.5)
    tokens, targets = batches(1)
    stages = make_stages(partition(model, 3), next_token_loss, tokens[0])
    for stage in stages:
        stage.module.eval()
    with torch.no_grad():
        logits = forward(stages, 0, (tokens[0],), targets[0], 1.0)[0]
        assert all(not stage.in_flight for stage in stages)
        assert torch.equal(logits, model.eval()(tokens[0]))
        assert torch.equal(stages[-1].take_losses()[0], next_token_loss(logits, targets[0]))
    assert not logits.requires_grad


def test_between_input_and_weight_gradient_only_the_work_is_held() -> None:
    gc.freeze()  # collections below look at new objects alone
    model = gpt()
    tokens, _ = batches(1)
    (stage,) = make_stages(partition(model, 1), lambda out, _: out.sum(), tokens[0])
    alive: list[weakref.ref[Tensor]] = []
    model.norm.register_forward_hook(lambda _, args, out: alive.append(weakref.ref(args[0])))
    stage.forward(0, (tokens[0],))
    assert alive[0]() is not None
    stage.backward(0, defer=True)
    gc.collect()
    assert alive[0]() is None
    assert stage.pending == (0,)
    stage.weight(0)
    stage.check_empty()


def test_what_a_stage_gives_away_is_not_kept_by_it() -> None:
    gc.freeze()  # collections below look at new objects alone
    model = Residual(linear(), linear()).double()
    tokens, _ = batches(1)
    stages = make_stages(partition(model, 2, costs=[1, 1]), None, tokens[0])
    storage = weakref.ref(stages[0].forward(0, (tokens[0],))[0].untyped_storage())
    gc.collect()
    assert storage() is None


class Inplace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


def test_misuse_is_named() -> None:
    model = Residual(linear(), Inplace()).double()
    tokens, _ = batches(1)
    stages = make_stages(partition(model, 2, costs=[1, 1]), lambda out, _: out, tokens[0])
    stages[0].forward(0, (tokens[0],))
    with pytest.raises(StageError, match="microbatch 0 is forwarded again"):
        stages[0].forward(0, (tokens[0],))
    with pytest.raises(StageError, match="microbatch 5 has not been forwarded"):
        stages[0].backward(5)
    with pytest.raises(StageError, match="microbatch 0 has no deferred"):
        stages[0].weight(0)
    with pytest.raises(StageError, match=r"still holds microbatches \[0\]"):
        stages[0].check_empty()
    with pytest.raises(StageError, match="0 output gradients for 1 outputs"):
        stages[0].backward(0)
    stages[0].reset()
    stages[0].check_empty()


def test_a_new_stage_takes_over_the_module_of_another() -> None:
    model = Residual(linear()).double()
    tokens, targets = batches(1)
    (first,) = make_stages(partition(model, 1), next_token_loss, tokens[0])
    first.forward(0, (tokens[0],), targets[0])
    (second,) = make_stages(partition(model, 1), next_token_loss, tokens[0])
    second.forward(0, (tokens[0],), targets[0])
    split([second], 0)
    assert model.head.weight.grad is not None


def test_a_loss_that_is_not_a_scalar_is_refused() -> None:
    tokens, targets = batches(1)
    (stage,) = make_stages(partition(gpt(), 1), lambda out, _: out, tokens[0])
    with pytest.raises(StageError, match=r"loss_fn returned a tensor of shape \[2, 4, 13\]"):
        stage.forward(0, (tokens[0],), targets[0])


def test_another_number_of_outputs_than_told_is_refused() -> None:
    tokens, _ = batches(1)
    parts = partition(Wide().double(), 3, costs=[1, 1, 1])
    bias = torch.zeros(2, TOKENS, 1).double()
    stages = make_stages(parts, None, tokens[0], bias)
    with pytest.raises(BoundaryError, match="1 values where"):
        stages[0]._output.pack((bias,))
