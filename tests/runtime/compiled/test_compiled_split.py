"""Compiled blocks under a split backward: I + W have the bits of the whole compiled backward, in as many graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from schedc_runtime.compiled.backends import cut_aot_eager, cut_inductor
from support.needs import needs
from support.split_models import Splitting, differing, plain
from support.sweeps import halved, in_sweeps

WIDTH = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
needs_compiler = needs("g++")


class Mlp(nn.Module):
    """The usual block: a norm stays in I, and so do biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Checkpointed(Mlp):
    """The compiler itself repeats the forward of a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x + 1, x + 2, need_weights=False)[0]  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """One operation has the gradients of a convolution's input and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Table(nn.Module):
    """Nothing lies behind its node but weights, and I must run it all the same; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(self.table(ids))))  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """Weights that follow from others: a norm of a weight, and a product of two narrow matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.size = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, 1))
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True) + self.a @ self.b
        return torch.nn.functional.linear(x, weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], float]] = {
    "mlp": (Mlp, lambda n: torch.randn(2, n, WIDTH), 0.94),
    "checkpoint": (Checkpointed, lambda n: torch.randn(2, n, WIDTH), 0.94),
    "attention": (Attention, lambda n: torch.randn(2, n, WIDTH), 0.93),
    "convolutions": (Convolutions, lambda n: torch.randn(2, 3, 12, n), 0.95),
    "table": (Table, lambda n: torch.randint(0, 9, (2, n)), 1.0),
    "weighted": (Weighted, lambda n: torch.randn(2, n, WIDTH), 0.99),
}
"""By name: the block, an input of a length, and the least share of its elements that waits."""


def check(
    name: str,
    own: Any,
    torchs: str,
    *,
    autocast: torch.dtype | None = None,
    lengths: tuple[int, ...] = (12, 12),
    dynamic: bool = False,
) -> None:
    """I + W of microbatches that are in flight together, and B, against the whole backward of torch's backend."""
    torch._dynamo.reset()
    make, sample, share = MODELS[name]
    torch.manual_seed(0)
    block, inputs = make(), [sample(length) for length in lengths]
    expected = copy.deepcopy(block)
    counter = CompileCounterWithBackend(torchs)
    expected.compile(backend=counter, fullgraph=True, dynamic=dynamic)
    wanted = plain(expected, inputs, autocast)
    torch._dynamo.reset()  # its knowledge of lengths, too
    graphs: list[int] = []
    block.compile(backend=lambda *args: graphs.append(1) or own(*args), fullgraph=True, dynamic=dynamic)
    splitting = Splitting(block, autocast)
    grads = [splitting.i(key, x) for key, x in enumerate(inputs)]
    waiting = splitting.put_off(0)
    assert sum(leaf.numel() for leaf in waiting) >= share * sum(p.numel() for p in block.parameters())
    assert all(leaf.grad is None for leaf in waiting)
    for key in range(len(inputs)):
        splitting.split.weight(key)
    assert differing(block, expected) == []
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))  # type: ignore[arg-type]
    block.zero_grad()
    plain(block, inputs, autocast)
    assert differing(block, expected) == []
    assert len(graphs) == counter.frame_count


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("autocast", halved([None, torch.bfloat16]))
@pytest.mark.parametrize("name", MODELS)
def test_i_and_w_have_the_bits_of_the_whole_backward(name: str, autocast: torch.dtype | None) -> None:
    check(name, cut_aot_eager, "aot_eager", autocast=autocast)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", halved(["mlp", "table"]))
def test_lengths_that_change(name: str) -> None:
    check(name, cut_aot_eager, "aot_eager", lengths=(12, 10, 7), dynamic=True)


@pytest.mark.slow
@needs_compiler
def test_inductor_chooses_strides() -> None:
    check("convolutions", cut_inductor, "inductor")


@in_sweeps("test_inductor_chooses_strides", "test_lengths_that_change")
@pytest.mark.slow
@needs_compiler
def test_inductor_with_lengths_that_change() -> None:
    check("mlp", cut_inductor, "inductor", lengths=(12, 9), dynamic=True)


class Residual(nn.Module):
    """A small block, compiled on its own. number: differs from block to block, which takes a graph each."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * (1 + self.number)


class Several(nn.Module):
    """Compiled blocks among other code. use: the model's forward."""

    def __init__(self, use: Callable[[Several, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.last, self.use = Residual(), Residual(), nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def split_blocks(use: Callable[[Several, Tensor], Tensor], change: Callable[[Several], Any]) -> tuple[Several, int]:
    """(the model after I + W of two microbatches, parameters that waited); its bits are those of whole backwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Several(use), torch.randn(3, WIDTH)
    expected = copy.deepcopy(model)
    for net, backend in ((model, cut_aot_eager), (expected, "aot_eager")):
        net.one.compile(backend=backend, fullgraph=True)
        net.two.compile(backend=backend, fullgraph=True)
        change(net)
    wanted = plain(expected, [x, 2 * x])
    splitting = Splitting(model)
    grads = [splitting.i(key, factor * x) for key, factor in enumerate((1, 2))]
    waiting = len(splitting.put_off(0))
    for key in range(2):
        splitting.split.weight(key)
    assert differing(model, expected) == []
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))  # type: ignore[arg-type]
    return model, waiting


def tie(model: Several) -> None:
    model.last.weight = model.two.layer.weight = model.one.layer.weight


@pytest.mark.slow
def test_uses_of_a_weight_inside_and_outside_are_summed_in_autograds_order() -> None:
    assert split_blocks(lambda net, x: net.last(net.two(net.one(x))), tie)[1] == 2


@pytest.mark.slow
def test_a_weight_that_the_loss_uses_too_stays_in_i_with_its_block() -> None:
    def use(net: Several, x: Tensor) -> Tensor:
        return net.last(net.two(net.one(x))) + net.one.layer.weight.square().sum()

    assert split_blocks(use, lambda net: None)[1] == 3  # the weight of `two`, and `last` with its bias


def test_a_checkpoint_around_a_block_repeats_its_forward_once() -> None:
    forwards: list[int] = []

    def use(net: Several, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: forwards.append(1) or net.one(x), x, use_reentrant=False)
        return net.last(net.two(x))  # type: ignore[no-any-return]

    assert split_blocks(use, lambda net: None)[1] == 4
    assert len(forwards) == 2 * 2 * 2  # two models, two microbatches, F and the repetition


def test_hooks_of_parameters_fire_once_in_w() -> None:
    calls: list[str] = []

    def change(net: Several) -> None:
        net.one.layer.weight.register_hook(lambda grad: 2 * grad)
        net.two.layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("added"))

    split_blocks(lambda net, x: net.last(net.two(net.one(x))), change)
    assert len(calls) == 2 * 2


def test_half_frozen_blocks() -> None:
    def change(net: Several) -> None:
        net.one.layer.weight.requires_grad_(False)
        net.two.layer.bias.requires_grad_(False)

    assert split_blocks(lambda net, x: net.last(net.two(net.one(x))), change)[1] == 3
