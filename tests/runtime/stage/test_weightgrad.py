"""Deferred weight gradients: the same bits as plain autograd, and plain autograd wherever deferring is not right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedc_runtime.errors import StageError
from schedc_runtime.stage.weight_gradients import Vectors, WeightSink, install, uninstall


class Net(nn.Module):
    """Every layer that is handled, with and without bias, over inputs of two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=2)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.down(torch.relu(self.up(self.norm(x).transpose(0, -2)))).transpose(0, -2)


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for name, grad in grads(a).items():
        other = grads(b)[name]
        assert (grad is None) == (other is None), name
        assert grad is None or other is None or torch.equal(grad, other), name


def step(model: nn.Module, ids: Tensor) -> None:
    torch.sin(model(ids)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 5), (1, 1)])
def test_same_bits_at_once_deferred_and_plain(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Net().to(dtype)
    models = [copy.deepcopy(plain) for _ in range(2)]
    sinks = [WeightSink(), WeightSink()]
    for model, sink in zip(models, sinks, strict=True):
        install(model, sink)
    batches = [torch.randint(0, 9, shape) for _ in range(3)]
    for m, ids in enumerate(batches):
        step(plain, ids)
        step(models[0], ids)
        with sinks[1].deferring(m, Vectors(models[1]).late()):
            step(models[1], ids)
        assert len(sinks[1].pending[m]) == 5  # two products, the embedding, and what autograd has of the norm
    assert not any(gradient is not None for gradient in grads(models[1]).values())
    for m in range(3):
        sinks[1].flush(m)
    for model in models:
        assert_same(model, plain)
        assert not any(p.grad.requires_grad for p in model.parameters())


def assert_no_work(prepare: Callable[[Net], object], run: Callable[[Net, Tensor], None] = step) -> None:
    """The layers' gradients come from autograd, at once, as without the installation."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    prepare(plain)
    prepare(model)
    sink = WeightSink()
    install(model, sink)
    ids = torch.randint(0, 9, (3, 4))
    run(plain, ids)
    with sink.deferring(0):
        run(model, ids)
    assert not sink.pending[0]
    assert_same(model, plain)


def test_frozen_weights_make_no_work() -> None:
    def freeze(model: Net) -> None:
        for layer in (model.embed, model.up, model.down):
            layer.weight.requires_grad_(False)

    assert_no_work(freeze)


def test_hooks_on_a_weight_still_fire() -> None:
    def triple(parameter: Tensor) -> None:
        parameter.grad *= 3

    def hook(model: Net) -> None:
        for layer in (model.embed, model.up):
            layer.weight.register_hook(lambda grad: grad * 2)
        model.down.weight.register_post_accumulate_grad_hook(triple)

    assert_no_work(hook)


def test_autocast_is_left_to_autograd() -> None:
    def run(model: Net, ids: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids)
        out.float().sum().backward()

    assert_no_work(lambda model: None, run)


def test_subclasses_and_parametrized_layers_keep_their_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    def replace(model: Net) -> None:
        doubled = Doubled(10, 6, bias=False)
        doubled.weight = model.down.weight
        model.down = doubled
        nn.utils.parametrizations.weight_norm(model.up)
        model.embed.weight.requires_grad_(False)

    assert_no_work(replace)


def test_no_grad_and_uninstall_leave_nothing_behind() -> None:
    model = Net()
    install(model, WeightSink())
    with torch.no_grad():
        assert not model(torch.zeros(2, 2, dtype=torch.int64)).requires_grad
    with pytest.raises(StageError, match="`embed` already belongs to another stage"):
        install(model, WeightSink())
    uninstall(model)
    assert all("forward" not in vars(layer) for layer in model.modules())


def test_a_deep_copy_has_its_own_layers_and_sink() -> None:
    model = Net()
    sink = WeightSink()
    install(model, sink)
    twin = copy.deepcopy(model)
    with sink.deferring(0):
        step(twin, torch.ones(2, 3, dtype=torch.int64))
    assert not sink.pending[0]
    assert twin.up.weight.grad is not None
    assert model.up.weight.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_defers_once_and_runs_the_forward_twice(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, model = Net().double(), Net().double()
    model.load_state_dict(plain.state_dict())
    sink = WeightSink()
    install(model, sink)
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 9, (3, 4))
    start = torch.zeros(3, 4, 6, dtype=torch.float64, requires_grad=True)

    def run(net: Net) -> None:
        out = checkpoint(lambda ids, x: net(ids) + x, ids, start, use_reentrant=reentrant)
        torch.sin(out).sum().backward()

    run(plain)
    with sink.deferring(7):
        run(model)
    assert len(sink.pending[7]) == 3
    sink.flush(7)
    assert len(calls) == 2
    assert_same(model, plain)


def test_the_gradient_of_a_gradient_is_refused() -> None:
    model = Net()
    install(model, WeightSink())
    loss = torch.sin(model(torch.ones(2, 3, dtype=torch.int64))).sum()
    with pytest.raises(StageError, match="gradient of a gradient"):
        torch.autograd.grad(loss, list(model.norm.parameters()), create_graph=True)


def test_a_weight_used_twice_is_summed_the_same_in_both_modes() -> None:
    torch.manual_seed(0)
    at_once = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    at_once[2].weight = at_once[0].weight
    deferred = copy.deepcopy(at_once)
    sinks = [WeightSink(), WeightSink()]
    install(at_once, sinks[0])
    install(deferred, sinks[1])
    x = torch.randn(5, 4)
    at_once(x).sum().backward()
    with sinks[1].deferring(0):
        deferred(x).sum().backward()
    sinks[1].flush(0)
    assert_same(at_once, deferred)


def test_a_bias_is_left_to_autograd_alone_if_it_must_be() -> None:
    """Hooked, its gradient appears at once, while that of its weight waits; frozen, it gets none."""
    model = Net()
    sink = WeightSink()
    install(model, sink)
    seen: list[Tensor] = []
    model.up.bias.register_hook(seen.append)
    model.norm.bias.requires_grad_(False)
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with sink.deferring(0, Vectors(model).late()):
        step(model, torch.ones(2, 3, dtype=torch.int64))
    assert len(seen) == 2
    assert {name for name, grad in grads(model).items() if grad is not None} == {"up.bias", "norm.weight"}
    sink.flush(0)
    assert {name for name, grad in grads(model).items() if grad is None} == {"norm.bias"}


def test_gradients_that_are_there_stay_while_a_backward_is_deferred() -> None:
    """Vectors that two layers share are added once, and a backward that fails leaves what was there before it."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    sink = WeightSink()
    install(model, sink)
    xs = torch.randn(3, 5, 4)
    for m, x in enumerate(xs):
        plain(x).sin().sum().backward()
        with sink.deferring(m, Vectors(model).late()):
            model(x).sin().sum().backward()
        sink.flush(m)
    assert_same(model, plain)
    output = model(xs[0]).sin()
    output.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError), sink.deferring(3, Vectors(model).late()):
        output.sum().backward()
    assert_same(model, plain)
