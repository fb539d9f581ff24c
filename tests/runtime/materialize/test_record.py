"""A recorded construction: what it makes is what the code says, for any part of the names."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedc_runtime import deferred
from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.construction import construction_of
from schedc_runtime.materialize.fill import fill_modules
from schedc_runtime.materialize.tape import TAPES, forget_dead
from schedc_runtime.materialize.values import Values

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Layers and initialisers that torch has, and tensors made in the ways that models make them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 4)] + torch.linspace(0, 1, 3).tolist()
        self.embedding = nn.Embedding(9, 8, padding_idx=2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.lstm, self.norm = nn.LSTM(3, 4), nn.BatchNorm1d(4)
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.spectral_norm = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.head = nn.Linear(8, 9)
        self.head.weight = self.embedding.weight
        self.old_style = nn.Parameter(torch.Tensor(4, 5))
        self.cut_off, self.peak = nn.Parameter(torch.empty(40, 40)), nn.Parameter(torch.empty(40, 40))
        self.orthogonal, self.sparse = nn.Parameter(torch.empty(6, 6)), nn.Parameter(torch.empty(6, 6))
        self.dirac = nn.Parameter(torch.empty(3, 3, 3))
        nn.init.uniform_(self.old_style)
        nn.init.trunc_normal_(self.cut_off, std=1.0, a=-1.0, b=1.0)
        nn.init.trunc_normal_(self.peak, std=1.0, a=2.0, b=4.0)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.sparse_(self.sparse, 0.5)
        nn.init.dirac_(self.dirac)
        base, whole = torch.randn(3), torch.randn(10)
        self.twin, self.other_twin = nn.Parameter(base.clone()), nn.Parameter(base.clone())
        self.first_half, self.second_half = nn.Parameter(whole[:5]), nn.Parameter(whole[5:])
        self.lstm_copy = copy.deepcopy(self.lstm)


class Exact(nn.Module):
    """Tensors without random numbers, in the ways that models make them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / (1e4 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        self.positions = nn.Parameter(torch.zeros(4, 4))
        table = torch.arange(16.0).view(4, 4)
        self.positions.data.copy_(table * torch.tensor(2.0))
        self.positions.data[1] = torch.tensor([9.0, 8.0, 7.0, 6.0])
        mask = torch.zeros(4, 4)
        mask[torch.ones(4, 4).triu(1).bool()] = float("-inf")
        self.mask = mask
        self.pairs = torch.ones(4, 4).triu(1).nonzero()
        constant = torch.tensor([5.0, 5.0])
        self.captured = nn.Parameter(torch.ones(2) * constant)
        constant.zero_()  # captured values stay as they were
        self.alike = (torch.equal(table, table + 1), torch.allclose(table, table + 1e-9), bool((table > 3).any()))
        values = torch.linspace(0, 1, 5)
        values.mul_(3)
        self.register_buffer("scaled", values[1:4])
        values.add_(1)


def made(model: nn.Module, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    values = Values(construction_of(model), seed, **options)
    values.check()
    fill_modules([model], values, CPU, {})
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def test_every_initialiser_of_torch() -> None:
    with deferred():
        model = Layers()
    assert all(p.is_meta for p in model.parameters())
    assert model.rates == Layers().rates
    tensors = made(model)
    for name, expected in {**dict(Layers().named_parameters()), **dict(Layers().named_buffers())}.items():
        tensor = tensors[name]
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (expected.shape, expected.stride(), expected.dtype), (
            name
        )
        assert tensor.device == CPU
        assert tensor.requires_grad == expected.requires_grad
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.embedding.weight[2], torch.zeros(8))
    assert torch.equal(model.lstm.weight_ih_l0, model.lstm_copy.weight_ih_l0)
    assert torch.equal(model.twin, model.other_twin)
    first, second = model.encoder.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight)
    assert not torch.equal(first.linear1.weight[:8, :8], first.self_attn.out_proj.weight)
    assert torch.allclose(model.orthogonal @ model.orthogonal.T, torch.eye(6), atol=1e-5)
    assert ((model.sparse == 0).sum(0) == 3).all()
    assert torch.equal(model.dirac, Layers().dirac)
    cut_off, peak = model.cut_off.detach(), model.peak.detach()
    assert float(cut_off.abs().max()) <= 1.0
    assert 0.4 < float(cut_off.std()) < 0.65
    assert 2.0 <= float(peak.min()) <= float(peak.max()) <= 4.0
    assert not torch.equal(model.first_half, model.second_half)
    assert model.first_half.untyped_storage().nbytes() == 5 * 4


def test_what_has_no_random_numbers_has_the_bits_of_an_eager_construction() -> None:
    with deferred():
        model = Exact()
    made(model)
    assert model.alike == (False, True, True)
    for name in ("frequencies", "constant", "positions", "mask", "pairs", "captured", "scaled"):
        assert torch.equal(getattr(model, name), getattr(Exact(), name)), name


@pytest.mark.slow
def test_values_follow_from_seed_and_name_alone() -> None:
    def part(seed: int, every: int) -> dict[str, Tensor]:
        with deferred():
            model = Layers()
        values = Values(construction_of(model), seed)
        names = list(values.construction.names)[::every]
        torch.manual_seed(every)
        return {n: values.make(n, model.get_parameter(n), CPU) for n in names if n in dict(model.named_parameters())}

    whole, some, others = part(0, 1), part(0, 3), part(1, 3)
    assert all(torch.equal(whole[name], value) for name, value in some.items())
    assert not torch.equal(whole["cut_off"], part(1, 1)["cut_off"])
    assert others.keys() == some.keys()


def test_the_callers_random_numbers_go_on() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with deferred():
        model = Layers()
    made(model)
    assert torch.equal(torch.rand(3), expected)


def test_objects_hooks_attributes_and_optimizers_stay() -> None:
    with deferred():
        model = nn.Linear(3, 2)
    weight, events = model.weight, []
    weight.mark = "mine"  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda grad: events.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: events.append("after"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made(model)
    before = weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert (model.weight is weight, weight.mark, events) == (True, "mine", ["hook", "after"])  # type: ignore[attr-defined]
    assert torch.equal(weight, before - 1)
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert events == ["hook", "after", "after"]


def test_parameters_over_one_memory_stay_so() -> None:
    with deferred():
        model = nn.Module()
        model.one = nn.Parameter(torch.randn(4, 3))
        model.turned = nn.Parameter(model.one.detach().t())
    made(model)
    assert torch.equal(model.one, model.turned.t())
    assert model.one.data_ptr() == model.turned.data_ptr()


def test_plain_meta_models_initialise_themselves() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2), nn.Embedding(5, 4))
    tensors = made(model, seed=2)
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2), nn.Embedding(5, 4))
    assert all(torch.equal(tensors[name], value) for name, value in made(again, seed=2).items())
    assert torch.equal(tensors["1.running_var"], torch.ones(4))
    assert float(tensors["2.in_proj_weight"].detach().std()) > 0.1


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@pytest.mark.parametrize("plain", [True, False])
def test_a_buffer_that_nobody_fills_is_named(plain: bool) -> None:
    with torch.device("meta") if plain else deferred():
        model = nn.Sequential(Forgetful())
    with pytest.raises(MaterializeError, match=r"nobody fills the buffer `0\.table`"):
        made(model)
    tensors = made(model, rule=lambda name, tensor: tensor.fill_(7) if name == "0.table" else None)
    assert tensors["0.table"].tolist() == [7, 7, 7]
    assert tensors["0.weight"].tolist() == [0, 0]


def test_a_module_that_fails_to_initialise_itself_says_why() -> None:
    class Failing(nn.Linear):
        def reset_parameters(self) -> None:
            raise ValueError("no table for this size")

    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.__class__ = Failing
    with pytest.raises(
        MaterializeError, match=r"nobody fills the parameter `weight`: ValueError: no table.* and 1 more"
    ):
        made(model)


def test_the_users_rule_replaces_the_models() -> None:
    with deferred():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def rule(name: str, tensor: Tensor) -> Tensor | None:
        if name == "0.bias":
            return torch.full_like(tensor, 4.0)
        return nn.init.normal_(tensor, std=5.0) if tensor.dim() > 1 else None

    tensors = made(model, rule=rule)
    assert tensors["0.bias"].tolist() == [4, 4, 4]
    assert tensors["1.running_var"].tolist() == tensors["1.weight"].tolist() == [1, 1, 1]
    with deferred():
        again = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    torch.manual_seed(9)
    assert torch.equal(made(again, rule=rule)["0.weight"], tensors["0.weight"])


def test_a_decision_by_random_numbers_names_the_line() -> None:
    with (
        pytest.raises(MaterializeError, match=r"follows from random numbers\n  --> .*test_record.py:\d+: .*torch.rand"),
        deferred(),
    ):
        nn.Dropout(torch.rand(1).item())


def test_conversions_outside_of_the_recording_are_refused() -> None:
    with deferred():
        model = nn.Linear(2, 2)
    model.to(torch.bfloat16)
    with pytest.raises(MaterializeError, match="nobody fills the parameter `weight`") as refusal:
        made(model)
    assert "convert the model inside" in refusal.value.help


def test_recordings_do_not_nest_and_end_with_their_model() -> None:
    gc.freeze()  # collections below look at new objects alone
    with pytest.raises(MaterializeError, match="inside of deferred"), deferred(), deferred():
        pass
    with deferred():
        model = nn.Linear(2, 2)
    gc.collect()
    forget_dead()
    count = len(TAPES)
    del model
    gc.collect()
    forget_dead()
    assert len(TAPES) < count


def test_a_graph_on_the_meta_device_does_not_disturb() -> None:
    with deferred():
        model = nn.Linear(2, 2)
    kept = model(torch.empty(1, 2, device="meta"))
    made(model)
    model(torch.ones(3, 2)).sum().backward()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [3, 3]
    assert kept.is_meta
