"""Parameters, FLOPs and held tensors of models: against Hugging Face, against published counts, and against plans."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from schedc.ir.plan import BlockSizes, ExpertSizes, Level
from schedc.model.counts import layer_flops, model_flops, model_parameters, saved_tensors, seen
from schedc.model.layer import Layer
from schedc.model.parts import PartName
from schedc.model.sizes import AttentionKind, AttentionSizes, LayerKind, ModelSizes, MoeSizes
from schedc.plan.counts.layers import sizes_of
from schedc.planner.model.config import parse_config
from schedc.planner.model.read import load_model
from schedc.source import Source
from support.paths import ROOT

CONFIGS = ROOT / "tests" / "data" / "models"

PUBLISHED = {
    "deepseek-v3": 671e9,
    "gpt-oss-120b": 116.83e9,
    "gpt-oss-20b": 20.91e9,
    "gpt2": 124e6,
    "llama-3.1-405b": 405e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.1-8b": 8.03e9,
    "mixtral-8x22b": 141e9,
    "mixtral-8x7b": 46.7e9,
    "pangu-ultra-moe-718b": 718e9,
    "qwen3-235b-a22b": 235e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-8b": 8.2e9,
}
"""Totals that their authors state; the last layers of MTP are not in them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    assert model_parameters(load_model(CONFIGS / f"{name}.json")).total == pytest.approx(PUBLISHED[name], rel=0.005)


FURTHER = [
    ("llama-3.1-8b", (16, 2048, 32, 8, 8192, 128_256), {"head_dim": 64, "tie_word_embeddings": True}, 1_235_814_400),
    ("llama-3.1-8b", (80, 8192, 64, 8, 28_672, 32_000), {"max_sequence_length": 2048}, 68_976_648_192),
    ("llama-3.1-8b", (30, 576, 9, 3, 1536, 49_152), {"tie_word_embeddings": True, "rotary_dim": 64}, 134_515_008),
    ("qwen3-8b", (28, 1024, 16, 8, 3072, 151_936), {"tie_word_embeddings": True}, 596_049_920),
    ("qwen3-8b", (64, 5120, 64, 8, 25_600, 151_936), {}, 32_762_123_264),
    (
        "qwen3-30b-a3b",
        (62, 6144, 96, 8, 8192, 151_936),
        {
            "num_experts": 160, "moe_intermediate_size": 2560, "qkv_bias": False, "use_qk_norm": True,
            "shared_expert_intermediate_size": 0,
        },
        480_154_875_392,
    ),
]  # fmt: skip
"""Other sizes of the same families: layers, columns, heads, heads of keys, columns of an MLP, words."""

_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "more", "total"), FURTHER, ids=lambda value: str(value)[:20])
def test_totals_of_other_sizes(name: str, sizes: tuple[int, ...], more: dict[str, Any], total: int) -> None:
    values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    text = json.dumps(values | dict(zip(_SIZES, sizes, strict=True)) | more)
    assert model_parameters(parse_config(Source("config.json", text))).total == total


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "total"), [(24, 1024, 16, 354_823_168), (36, 1280, 20, 774_030_080)]
)
def test_totals_of_the_other_gpt2(layers: int, hidden: int, heads: int, total: int) -> None:
    """Their configurations have keys that the smallest model's lacks."""
    values = json.loads((CONFIGS / "gpt2.json").read_text(encoding="utf-8"))
    values |= {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_special": 0, "predict_special_tokens": True}
    assert model_parameters(parse_config(Source("config.json", json.dumps(values)))).total == total


def test_glm_counts_mtp_and_leaves_out_words() -> None:
    """Its report counts the layers of MTP, and neither embedding nor head (arXiv:2508.06471, table 1)."""
    counts = model_parameters(load_model(CONFIGS / "glm-4.5.json"))
    words = counts.by_part[PartName.EMBEDDING] + counts.by_part[PartName.HEAD]
    assert counts.total + counts.mtp - words == pytest.approx(355e9, rel=0.005)


def test_active_parameters_are_the_published_ones() -> None:
    """gpt-oss counts the head among them and not the embedding (model card, table 1)."""
    for name, published in (("gpt-oss-120b", 5.13e9), ("gpt-oss-20b", 3.61e9)):
        counts = model_parameters(load_model(CONFIGS / f"{name}.json"))
        assert counts.active - counts.by_part[PartName.EMBEDDING] == pytest.approx(published, rel=0.005)
    assert model_parameters(load_model(CONFIGS / "deepseek-v3.json")).active == pytest.approx(37e9, rel=0.02)


def _random_model(draw: random.Random) -> tuple[ModelSizes, BlockSizes, ExpertSizes | None]:
    """A model, and the same sizes as lines of a plan say them."""
    hidden, heads, head = 64, draw.choice((2, 4)), draw.choice((8, 16))
    mla, gated, moe = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
    q, latent, rotary = (draw.choice((0, 12)), 16, 4) if mla else (0, 0, 0)
    keys = heads if mla else draw.choice((1, 2))
    ffn, gated = draw.choice((96, 128)), gated or moe
    attention = AttentionSizes(
        heads, keys, head, head, AttentionKind.MLA if mla else AttentionKind.GQA, q, latent, rotary
    )
    block = BlockSizes(hidden, heads, head, 0 if mla else keys, q, latent, rotary, ffn, 2 + gated, 256)
    experts = ExpertSizes(8, draw.choice((1, 2)), shared=draw.choice((0, 1)), width=32, hidden=hidden) if moe else None
    sizes = MoeSizes(8, experts.top, 32, shared=experts.shared) if experts else None
    return ModelSizes("", 1, hidden, 0, attention, ffn, gated, sizes, seq=256), block, experts


def test_lines_of_plans_say_the_sizes_of_a_model() -> None:
    draw = random.Random(7)
    for _ in range(60):
        model, block, experts = _random_model(draw)
        assert sizes_of(experts, block, 64) == model
        layer = Layer(model, model.kind_of(0), "bf16")
        for level in Level:
            saved = saved_tensors(model, layer.kind, "bf16", level)
            assert layer.held(level) == sum(tensor.bytes for tensor in saved)
        assert layer.flops == sum(layer_flops(model, 0, 256).values())


def test_a_layer_of_a_kind_that_the_model_lacks_has_attention_and_norms() -> None:
    model = load_model(CONFIGS / "qwen3-8b.json").at(4096)
    layer = Layer(model, LayerKind.MOE)
    assert layer.held() == sum(tensor.bytes for tensor in saved_tensors(model, LayerKind.MOE)) > 0
    assert layer.saving(Level.FULL).flops == 0
    assert 0 < layer.flops < Layer(model, LayerKind.DENSE).flops


def test_norms_of_heads_and_behind_halves_are_held_and_named() -> None:
    plain = load_model(CONFIGS / "deepseek-v3.json")
    sandwich = replace(plain, norms=4)
    names = {tensor.name for tensor in saved_tensors(sandwich, LayerKind.DENSE)}
    assert {"results before norms", "narrow keys", "MLP products"} <= names
    more = Layer(sandwich, LayerKind.DENSE).held() - Layer(plain, LayerKind.DENSE).held()
    assert more == 2 * 2 * plain.hidden
    qwen = load_model(CONFIGS / "qwen3-8b.json")
    sizes = {tensor.name: tensor.bytes for tensor in saved_tensors(qwen, LayerKind.DENSE)}
    assert sizes["heads before norms"] == sizes["query"] + sizes["key"]


def test_flops_of_products_are_twice_the_parameters_they_multiply() -> None:
    """Without scores: two FLOPs for each active parameter of a product, here of a model without biases and norms."""
    model = load_model(CONFIGS / "mixtral-8x7b.json")
    counts, flops = model_parameters(model), model_flops(model, 4096)
    norms = counts.by_part[PartName.NORMS]
    scores = model.layers * 2 * 32 * 2 * 128 * 4096 / 2
    assert flops.total - scores == 2 * (counts.active - counts.by_part[PartName.EMBEDDING] - norms)
    assert sum(flops.by_part.values()) == flops.total + flops.mtp


def test_tokens_that_a_token_looks_at() -> None:
    assert (seen(4096, 0, True), seen(4096, 0, False)) == (2048, 4096)
    assert (seen(4096, 128, False), seen(64, 128, True)) == (128, 32)
    exact = sum(min(position, 128) for position in range(1, 4097)) / 4096
    assert seen(4096, 128, True) == pytest.approx(exact, rel=0.005)
    oss = load_model(CONFIGS / "gpt-oss-20b.json")
    windowed, whole = (layer_flops(oss, layer, 4096)[PartName.ATTENTION] for layer in (0, 1))
    assert whole - windowed == 2 * 64 * 128 * (2048 - (128 - 2))
