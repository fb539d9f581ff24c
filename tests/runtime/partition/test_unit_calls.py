"""Units that depend on values, or that a model checkpoints or compiles; split points and stages that miss their aim."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import schedc
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import BoundaryError, PartitionError
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from support.sweeps import halved

WIDTH = 8
TOKENS = torch.arange(24).remainder(11).reshape(8, 3)
TARGETS = TOKENS.flip(0)


class Chain(nn.Module):
    """Embedding, four equal blocks, head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.called(block, x)
        return self.head(x)

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Clamping(nn.Module):
    """Takes a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x / 2 if x.abs().max() > 0.7 else x


class Routed(nn.Module):
    """Rows go to one of two layers, by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        result = torch.zeros_like(rows)
        for number, layer in enumerate(self.layers):
            chosen = (rows.argmax(-1) % 2 == number).nonzero().flatten()
            result = result.index_add(0, chosen, layer(rows[chosen]))
        return result.view_as(x)


class Halving(nn.Module):
    """Without parameters, and with a branch on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if x.abs().max() > 0.5 else x


class Between(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.halving = Halving()

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.halving(block(x))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(model: nn.Module, schedule: str = "zbh1", **options: object) -> dict[str, Tensor | None]:
    """Gradients of a step of four microbatches."""
    pipe = Pipeline(
        model, schedc.compile(schedule, P=2, M=4), loss_fn=loss_fn, in_process=True, example=TOKENS, **options
    )
    pipe.step(TOKENS, TARGETS)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    pipe.close()
    return grads


def serial(model: nn.Module) -> dict[str, Tensor | None]:
    for tokens, targets in zip(TOKENS.chunk(4), TARGETS.chunk(4), strict=True):
        (loss_fn(model(tokens), targets) / 4).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "model", [Chain(*[Clamping() for _ in range(4)]), Chain(*[Routed() for _ in range(4)]), Between()]
)
def test_a_unit_may_depend_on_values(model: nn.Module) -> None:
    expected = serial(copy.deepcopy(model))
    grads = trained(model)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name])


class Compressing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_what_was_assumed_of_a_unit_is_checked_when_it_runs() -> None:
    parts = partition(nn.Sequential(nn.Linear(3, 3), Compressing()), 2, costs=[1, 1], example=torch.ones(2, 3))
    infer_boundaries(parts, (torch.ones(2, 3),))
    with pytest.raises(
        BoundaryError, match=r"`1` returned \(float32\[1\]\).*like the first argument: \(float32\[2, 3\]"
    ):
        parts.modules[1](torch.tensor([[1.0, -1, -1], [-1, -1, -1]]))


class Counting(nn.Module):
    """Counts its forwards on real tensors. Its dropout shows whether a second forward draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += type(x) is Tensor
        return self.layers(x) * scale


class Checkpointed(Chain):
    """reentrant: how the blocks are checkpointed; None for not at all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(*[Counting() for _ in range(4)])
        self.reentrant = reentrant

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return block(x, scale=0.5)
        return checkpoint(lambda value: block(value, scale=0.5), x, use_reentrant=self.reentrant)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", halved(["zbh1", "1f1b"]))
def test_a_checkpoint_around_a_unit_runs_it_once_more_with_its_bits(reentrant: bool, schedule: str) -> None:
    torch.manual_seed(0)
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    model.load_state_dict(plain.state_dict())
    expected = trained(plain, schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = trained(model, schedule)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    assert [block.calls for block in plain.blocks] == [4] * 4
    assert [block.calls for block in model.blocks] == [8] * 4


def test_a_checkpointed_unit_gives_what_hooks_take_out_of_it() -> None:
    class Tapped(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            taken: list[Tensor] = []
            hook = self.blocks[1].layers[0].register_forward_hook(lambda _m, _a, output: taken.append(output))
            try:
                output = super().forward(x)
            finally:
                hook.remove()
            return output + taken[0].sum()

    torch.manual_seed(0)
    model = Tapped(False)
    plain = Tapped(None)
    plain.load_state_dict(model.state_dict())
    expected = trained(plain)
    assert all(torch.equal(grad, expected[name]) for name, grad in trained(model).items())


def test_saving_tensors_elsewhere_is_no_checkpoint() -> None:
    class Offloading(Checkpointed):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().called(block, x)

    model = Offloading(None)
    trained(model)
    assert [block.calls for block in model.blocks] == [4] * 4


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own code does so
def test_compiled_blocks_and_functions_are_recorded_as_their_code() -> None:
    activation = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")

    class Activated(Chain):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            return activation(block(x))

    torch.manual_seed(0)
    plain = Activated()
    model = copy.deepcopy(plain)
    model.blocks[1].compile(backend="eager")
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    expected = serial(plain)
    for name, grad in trained(model).items():
        torch.testing.assert_close(grad, expected[name.replace("_orig_mod.", "")])


def test_a_model_that_was_compiled_as_one_is_told_to_run_uncompiled() -> None:
    with pytest.warns(UserWarning, match=r"the model is compiled as one, .* compile=True"):
        partition(torch.compile(Chain(), backend="eager"), 2, example=TOKENS)


class ByValue(Chain):
    def __init__(self) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)])

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        if block is self.blocks[1]:
            return functional.linear(block[0](x), block[1].weight)
        return block(x)


class Twice(Chain):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(block(x))


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.parametrize(
    ("model", "points", "says"),
    [
        (
            ByValue(),
            ["blocks.1.1"],
            r"never called in a forward: .* by value.*blocks\.1\.0, blocks\.2, blocks\.3, head",
        ),
        (Twice(), ["blocks.2"], r"`blocks.2` is called 2 times.*called once: embed, head"),
        (Parameters(), None, r"has 1 unit for 2 stages: embed\n.*move parts of the forward into submodules"),
        (Chain(Clamping()), None, r"1 unit for 2 stages: blocks\.0\n.*as embed, blocks\.0, head, blocks\.0\.inner;"),
    ],
)
def test_what_cannot_begin_a_stage_is_told_with_what_can(model: nn.Module, points: list[str] | None, says: str) -> None:
    with pytest.raises(PartitionError, match=f"(?s){says}"):
        partition(model, 2, split_points=points)


def test_a_stage_without_parameters_beside_one_of_several_units_is_a_warning() -> None:
    says = re.escape("stage 1 holds no parameters, and stage 2 holds 3 units with parameters (blocks.1, blocks.2, blo")
    with pytest.warns(UserWarning, match=says):
        partition(Chain(), 3, split_points=["blocks.1", "blocks.1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(Chain(), 3)


def test_a_split_point_inside_of_a_checkpointed_unit_checkpoints_its_parts() -> None:
    model = Checkpointed(False)
    plain = Checkpointed(None)
    plain.load_state_dict(model.state_dict())
    cut = Cut(split_points=["blocks.2.layers.2"])
    expected = trained(plain, cut=cut)
    assert all(torch.equal(grad, expected[name]) for name, grad in trained(model, cut=cut).items())


class Writing(Chain):
    """Writes between blocks, and in the first operation of a block: into what another stage may have made."""

    def __init__(self) -> None:
        super().__init__(*[nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)])

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(x * 1.5)
        x = block(x)
        x += y
        x[:, 0] = 0
        return x


@pytest.mark.parametrize("schedule", ["zbh1", "dualpipev"])
def test_a_write_to_what_another_stage_made_has_the_gradients_of_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    model = Writing()
    expected = serial(copy.deepcopy(model))
    for name, grad in trained(model, schedule, cut=Cut(blocks="blocks", costs=[1.0] * 4)).items():
        torch.testing.assert_close(grad, expected[name])


def test_a_write_to_what_another_segment_made_is_refused() -> None:
    with pytest.raises(InstructionError, match=r"(?s)writes into a value of another segment.*x = x \+ y rather than"):
        trained(Writing(), cut=Cut(segmented=True))


class Tripled(torch.autograd.Function):
    """Has another gradient than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


kept_apply = Tripled.apply


def test_functions_with_a_backward_of_their_own_keep_it() -> None:
    """Also where a model has kept their `apply` before it is recorded."""

    class Applying(Chain):
        def called(self, block: nn.Module, x: Tensor) -> Tensor:
            return kept_apply(Tripled.apply(block(x)))  # type: ignore[no-untyped-call]

    model = Applying()
    whole = copy.deepcopy(model)
    mine, expected = trained(model), serial(whole)
    for name, grad in expected.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-7, msg=name)
