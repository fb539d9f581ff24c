"""Units whose parts a model reads before their call, parameters of several names, models that convert their modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from support.needs import needed


class Table(nn.Module):
    """A table that gets its own parts from the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(8))
        self.scale = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
        return self.inner(x) * scale + places[: x.shape[1], None] / 8


class Reading(nn.Module):
    """Reads a buffer and parameters of units before their calls, some of them stages before."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tables[3].scale.sum() + self.tables[2].inner.bias
        for table in self.tables:
            x = torch.tanh(table(x, table.places, table.scale) + table.inner.weight[0])
        return x


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zbh1", 4)])
def test_units_keep_their_forward_where_their_parts_are_read(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    model = Reading().double()
    whole = copy.deepcopy(model)
    rows, targets = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    pipe = Pipeline(
        model, schedc.compile(schedule, P=ranks, M=4), loss_fn=squares, in_process=True, example=rows
    )  # fmt: skip
    loss, expected = pipe.step(rows, targets), squares(whole(rows), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    compare(pipe, whole, 1e-12)


def compare(pipe: Pipeline, whole: nn.Module, tolerance: float) -> None:
    """Names and gradients are those of the whole model."""
    held = dict(pipe.named_parameters())
    assert held.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(held[name].grad, parameter.grad, rtol=tolerance, atol=tolerance, msg=name)


def families() -> dict[str, Any]:
    """Tiny models: one reads a buffer before a call, one has a table under three names, one converts its router."""
    transformers = needed("transformers")
    both = {"vocab_size": 40, "d_model": 8, "decoder_start_token_id": 0, "pad_token_id": 0}
    return {
        "fnet": lambda: transformers.FNetForMaskedLM(transformers.FNetConfig(
            vocab_size=40, hidden_size=8, num_hidden_layers=4, intermediate_size=8, max_position_embeddings=16,
            hidden_dropout_prob=0.0)),
        "pegasus": lambda: transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(
            **both, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0)),
        "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(
                **both, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=2,
                expert_capacity=4, dropout_rate=0.0, router_jitter_noise=0.0, num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1)),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fnet", "pegasus", "switch"])
def test_families_have_the_names_and_gradients_of_the_model(family: str) -> None:
    dtype = torch.float32 if family == "switch" else torch.float64
    torch.manual_seed(0)
    model = families()[family]().to(dtype)
    whole = copy.deepcopy(model)
    ids = torch.arange(56).reshape(8, 7) % 37 + 3
    fields = {"input_ids": ids} | ({} if family == "fnet" else {"decoder_input_ids": ids[:, :5]})
    targets = torch.linspace(-1, 1, 8, dtype=dtype)

    def distance(output: Any, target: Tensor) -> Tensor:
        return (output.logits - target.view(-1, 1, 1)).square().mean()

    pipe = Pipeline(
        model, schedc.compile("1f1b", P=4, M=4), loss_fn=distance, in_process=True, example=fields
    )  # fmt: skip
    pipe.step(fields, targets)
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        (distance(whole(**{key: value[rows] for key, value in fields.items()}), targets[rows]) / 4).backward()
    compare(pipe, whole, 1e-5 if family == "switch" else 1e-12)
