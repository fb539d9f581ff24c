"""Split backwards: I + W have the bits of autograd's backward, whatever uses a weight, and hooks fire once."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.utils.checkpoint import checkpoint

from schedc_runtime.stage.hooks import has_hooks
from schedc_runtime.stage.recipes import RECIPES, Recipe, waits
from schedc_runtime.stage.split import SplitBackward, is_late
from support.split_models import MODELS, WIDTH, Doubling, Grouped, Splitting, Tokens, differing, gradients, plain


def check(make: Any, sample: Any, autocast: torch.dtype | None = None, dtype: torch.dtype = torch.float32) -> float:
    """I + W of three microbatches against autograd; the share of the trainable elements that W computes."""
    torch.manual_seed(0)
    model = make().to(dtype)
    expected = copy.deepcopy(model)
    inputs = [x.to(dtype) if (x := sample()).is_floating_point() else x for _ in range(3)]
    splitting = Splitting(model, autocast)
    for first in (True, False):  # then gradients are there
        wanted = plain(expected, inputs, autocast)
        grads = []
        for key, x in enumerate(inputs):
            splitting.mark = key != 1
            grads.append(splitting.i(key, x))
        elements = sum(leaf.numel() for leaf in splitting.put_off(2))
        for leaf in splitting.put_off(2):
            assert (leaf.grad is None) == first
        for key in range(3):
            splitting.split.weight(key)
        assert differing(model, expected) == []
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))  # type: ignore[arg-type]
    return elements / sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_autograd(name: str) -> None:
    make, sample, share = MODELS[name]
    assert check(make, sample) >= share
    if name != "opaque":
        assert check(make, sample, autocast=torch.bfloat16) >= share


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    assert check(Tokens, MODELS["tokens"][1], dtype=dtype) > 0.88


def test_grouped_products() -> None:
    assert check(Grouped, lambda: torch.randn(8, 16)) == 1


def test_sparse_gradients_of_an_embedding() -> None:
    torch.manual_seed(0)
    model, ids = nn.Embedding(9, WIDTH, sparse=True), torch.randint(0, 9, (4, 5))
    expected = copy.deepcopy(model)
    plain(expected, [ids, ids])
    splitting = Splitting(model)
    for key in range(2):
        splitting.i(key, ids)
    for key in range(2):
        splitting.split.weight(key)
    grads = [net.weight.grad.coalesce() for net in (model, expected)]  # type: ignore[union-attr]
    assert torch.equal(grads[0].indices(), grads[1].indices())
    assert torch.equal(grads[0].values(), grads[1].values())


class Scaled(nn.Module):
    """A block for the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


@pytest.mark.slow
def test_a_block_that_is_compiled_already_stays_in_i_and_keeps_its_bits() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(3, WIDTH)
    expected = copy.deepcopy(model)
    compiled = [torch.compile(net, backend="aot_eager", fullgraph=True) for net in (model, expected)]
    plain(compiled[1], [x, x])
    splitting = Splitting(compiled[0])
    with pytest.warns(UserWarning, match="pass compile=True"):
        splitting.i(0, x)
    splitting.i(1, x)  # without another warning
    assert splitting.put_off(0) == splitting.put_off(1) == []
    for key in range(2):
        splitting.split.weight(key)
    assert differing(model, expected) == []


@pytest.mark.parametrize("late", [has_hooks, is_late])
def test_gradients_that_are_there_stay_until_w(late: Any) -> None:
    """Those that I computes stay only where Ws may come in another order than Is."""
    torch.manual_seed(0)
    splitting = Splitting(Tokens(), late=late)
    for parameter in splitting.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: grad.clone() for name, grad in gradients(splitting.model).items() if grad is not None}
    splitting.i(0, torch.randint(0, 9, (4, 5)))
    changed = {n for n, grad in gradients(splitting.model).items() if not torch.equal(grad, before[n])}  # type: ignore[arg-type]
    assert changed == ({"norm.weight", "norm.bias", "up.bias"} if late is has_hooks else set())
    splitting.split.weight(0)
    assert not any(torch.equal(grad, before[name]) for name, grad in gradients(splitting.model).items())  # type: ignore[arg-type]


class Choosing(nn.Module):
    """A graph that changes from microbatch to microbatch: an expert without tokens, then another one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].detach() * 10).long() % 3 == number
            if rows.any():
                result = result.index_put((rows,), expert(x[rows]))
        return result * self.scale if x.sum() > 0 else result


def test_a_graph_that_changes_is_walked_anew() -> None:
    torch.manual_seed(1)
    model, inputs = Choosing(), list(torch.randn(8, 2, WIDTH))
    expected = copy.deepcopy(model)
    plain(expected, inputs)
    splitting = Splitting(model)
    for key, x in enumerate(inputs):
        splitting.i(key, x)
    for key in range(8):
        splitting.split.weight(key)
    assert differing(model, expected) == []


class Exchanging(nn.Module):
    """Two parts of a packed weight that change places from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.packed.chunk(2)
        first = int(x.sum() > 0)
        return torch.sin(torch.sin(x @ parts[first]) @ parts[1 - first])


def test_parts_of_a_packed_weight_are_told_apart() -> None:
    torch.manual_seed(0)
    model, inputs = Exchanging(), list(torch.randn(6, 3, WIDTH))
    assert {bool(x.sum() > 0) for x in inputs} == {True, False}
    expected = copy.deepcopy(model)
    plain(expected, inputs)
    splitting = Splitting(model)
    for key, x in enumerate(inputs):
        splitting.i(key, x)
        splitting.split.weight(key)
    assert differing(model, expected) == []


def test_the_same_graph_over_other_parameters_is_no_other_s() -> None:
    splitting = Splitting(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    splitting.i(0, torch.ones(2, WIDTH))
    old = splitting.model[0]  # type: ignore[index]
    splitting.split.weight(0)
    splitting.model[0] = nn.Linear(WIDTH, WIDTH)  # type: ignore[operator]
    splitting.i(1, torch.ones(2, WIDTH))
    splitting.split.weight(1)
    assert splitting.model[0].weight.grad is not None  # type: ignore[index]
    assert torch.equal(old.weight.grad, old.weight.grad.clone())


def test_hooks_keep_their_effect_and_fire_once_in_w() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 5))
    model, expected = Tokens(), Tokens()
    expected.load_state_dict(model.state_dict())
    calls: list[str] = []
    for net in (model, expected):
        net.up.weight.register_hook(lambda grad: grad * 2)
        net.norm.weight.register_hook(lambda grad: grad * 3)
        net.norm.register_forward_hook(lambda _, args, out: out.register_hook(lambda grad: grad * 5) and None)
        net.up.register_forward_hook(lambda _, args, out: out.register_hook(lambda grad: grad * 7) and None)
    plain(expected, [ids])
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))  # type: ignore[misc]
    # Trainers hook the node itself, too.
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: calls.append("node"))
    splitting = Splitting(model)
    splitting.i(0, ids)
    assert calls == []
    splitting.split.weight(0)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(calls) == sorted(names + ["node"] * len(names))
    assert differing(model, expected) == []
    assert len(model.up.weight._backward_hooks) == len(model.norm.weight._backward_hooks) == 1  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Layers in a checkpoint. It counts its forwards."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.forwards = reentrant, 0
        self.first, self.inside = nn.Linear(WIDTH, WIDTH), Tokens()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(len(x)).reshape(-1, 1)
        return self.last(checkpoint(self._inside, self.first(x), ids, use_reentrant=self.reentrant))  # type: ignore[no-any-return]

    def _inside(self, x: Tensor, ids: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(self.inside.up(x)) @ self.inside.down.weight.t() + self.inside(ids)[:, 0]


def test_a_checkpointed_region_runs_exactly_once_more_and_waits() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    model = Checkpointed(reentrant=False)
    expected = copy.deepcopy(model)
    plain(expected, [x])
    splitting = Splitting(model)
    splitting.i(0, x)
    put_off = {id(leaf) for leaf in splitting.put_off(0)}
    assert {id(p) for name, p in model.named_parameters() if "norm" not in name} == put_off
    assert model.forwards == 2
    splitting.split.weight(0)
    assert model.forwards == 2
    assert differing(model, expected) == []


def test_a_reentrant_checkpoint_runs_in_i_with_one_warning() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    model = Checkpointed(reentrant=True)
    expected = copy.deepcopy(model)
    plain(expected, [x, x])
    splitting = Splitting(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in range(2):
            splitting.i(key, x)
    texts = [text for w in caught if "reentrant checkpoints" in (text := str(w.message))]
    assert len(texts) == 1
    assert "all its weight gradients are computed in I" in texts[0]
    assert "pass use_reentrant=False" in texts[0]
    assert differing(model, expected) == []
    splitting.split.weight(0)
    splitting.split.weight(1)
    assert differing(model, expected) == []


def test_what_a_hook_keeps_elsewhere_comes_back_in_w() -> None:
    torch.manual_seed(0)
    model, x = MODELS["encoder layer"][0](), torch.randn(2, 5, 16)
    expected = copy.deepcopy(model)
    plain(expected, [x])
    splitting = Splitting(model)
    with save_on_cpu():
        _, loss = splitting.forward(x)
    splitting.split.backward(0, [get_gradient_edge(loss)], [torch.ones_like(loss)])
    splitting.split.weight(0)
    assert differing(model, expected) == []


def test_a_function_of_a_user_joins_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Doubling):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return 2 * grad @ weight.t(), None if waits(ctx) else 2 * x.t() @ grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Waiting.apply(Waiting.apply(x, self.weight), self.weight)  # type: ignore[no-untyped-call, no-any-return]

    assert check(Model, lambda: torch.randn(3, WIDTH)) == 0
    recipe = Recipe({1: (0,)}, lambda slots, grad, saved, facts: (2 * saved[0].t() @ grad,))
    monkeypatch.setitem(RECIPES, "WaitingBackward", recipe)
    assert check(Model, lambda: torch.randn(3, WIDTH)) == 1


def test_between_i_and_w_only_the_factors_are_held() -> None:
    """Two products hold their inputs and the gradients of their outputs; the graph and what else it saved are gone."""
    gc.freeze()  # collections below look at new objects alone
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH, bias=False))
    leaf = torch.randn(3, WIDTH, requires_grad=True)
    loss = torch.sin(model(leaf)).sum()
    split = SplitBackward()
    split.backward(0, [get_gradient_edge(loss)], [torch.ones_like(loss)])
    del loss
    gc.collect()
    works = [work for group in split.pending[0].products for work in group]
    assert [sorted(work.saved) for work in works] == [["self"], ["self"]]
    held = {tensor.untyped_storage()._cdata for work in works for tensor in (*work.saved.values(), work.grad)}
    assert len(held) == 4
    assert not any(tensor.requires_grad for work in works for tensor in work.saved.values())
