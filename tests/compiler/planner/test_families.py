"""Families of models: windows, experts and norms by mechanism, and all of them against transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from schedc.diagnostics import DiagnosticError
from schedc.model.counts import seen
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.planner.model.config import parse_config
from schedc.planner.model.families import NOT_MODELLED
from schedc.planner.model.file import parse_model, write_model
from schedc.source import Source
from support.needs import needed

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from truth.families import FAMILIES, all_families

SIZES = {
    "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def text_of(model_type: str, **values: Any) -> str:
    """A small configuration; experts only where the family has them. None takes a key out."""
    sizes = {key: value for key, value in SIZES.items() if "moe" in model_type or key not in _OF_EXPERTS}
    return json.dumps({"model_type": model_type, **sizes, **values}, indent=1)


def model_of(model_type: str, **values: Any) -> ModelSizes:
    """The model of a small configuration; as a model file it is the same."""
    model = parse_config(Source("config.json", text_of(model_type, **values)))
    assert parse_model(Source("config.toml", write_model(model))) == model
    return model


@pytest.mark.slow
def test_parameters_are_those_of_transformers_whatever_flag_is_turned() -> None:
    needed("transformers")
    cases = all_families()
    assert len(FAMILIES) >= 32
    assert len(cases) > 150
    assert [case for case in cases if not case.agrees] == []


WINDOWS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("mistral", {"sliding_window": 32}, (0, 1, 2, 3, 4, 5, 6, 7)),
    ("mistral", {"sliding_window": None}, ()),
    ("gemma2", {"sliding_window": 32}, (0, 2, 4, 6)),
    ("gemma3_text", {"sliding_window": 32}, (0, 1, 2, 3, 4, 6, 7)),
    ("gemma3_text", {"sliding_window": 32, "sliding_window_pattern": 4}, (0, 1, 2, 4, 5, 6)),
    ("exaone4", {"sliding_window": 32, "sliding_window_pattern": "LG"}, (0, 2, 4, 6)),
    ("exaone4", {"sliding_window": None, "sliding_window_pattern": 4}, ()),
    ("olmo3", {"sliding_window": 32, "layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, (7,)),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 6}, ()),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 6}, (6, 7)),
    ("qwen2", {"sliding_window": 32, "max_window_layers": 6}, ()),
    ("qwen3_moe", {"sliding_window": 32, "use_sliding_window": True}, (0, 1, 2, 3, 4, 5, 6, 7)),
    ("qwen3_moe", {"sliding_window": 32, "use_sliding_window": False}, ()),
]


@pytest.mark.parametrize(("model_type", "values", "layers"), WINDOWS)
def test_layers_with_windows(model_type: str, values: dict[str, Any], layers: tuple[int, ...]) -> None:
    model = model_of(model_type, **values)
    assert model.attention.windowed == layers
    assert all(model.window_of(layer) == (32 if layer in layers else 0) for layer in range(8))


def test_windows_that_nothing_places_are_refused() -> None:
    values = {"use_sliding_window": True, "sliding_window": 32}
    with pytest.raises(DiagnosticError, match="no list of the layers"):
        model_of("qwen2_moe", **values)
    assert model_of("qwen2_moe", **values, layer_types=["full_attention"] * 8).attention.windowed == ()


def test_llama4_looks_back_within_chunks_and_has_experts_in_some_layers() -> None:
    values = {
        "intermediate_size_mlp": 128,
        "num_local_experts": 8,
        "use_qk_norm": True,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 32,
    }
    model = model_of("llama4_text", **values, interleave_moe_layer_step=2)
    assert model.attention.windowed == (0, 1, 2, 4, 5, 6)
    assert model.attention.chunked
    assert [model.kind_of(layer) is LayerKind.MOE for layer in range(8)] == [False, True] * 4
    assert model.ffn == 128
    assert model.moe is not None
    assert (model.moe.width, model.moe.shared) == (96, 1)
    listed = model_of("llama4_text", **values, moe_layers=[3], no_rope_layers=[1, 0] * 4)
    assert [listed.kind_of(layer) for layer in range(8)].index(LayerKind.MOE) == 3
    assert listed.attention.windowed == (0, 2, 4, 6)


@pytest.mark.parametrize(("seq", "chunk"), [(64, 16), (50, 16), (10, 16)])
def test_tokens_seen_within_chunks(seq: int, chunk: int) -> None:
    """Counted one by one; the half of a score on the diagonal is left out, as in whole sequences."""
    causal = [token % chunk + 0.5 for token in range(seq)]
    both = [min(chunk, seq - token // chunk * chunk) for token in range(seq)]
    assert seen(seq, chunk, True, True) == pytest.approx(sum(causal) / seq)
    assert seen(seq, chunk, False, True) == pytest.approx(sum(both) / seq)


def test_places_of_experts() -> None:
    ernie = {"moe_k": 2, "moe_num_experts": 8, "moe_layer_start_index": 2, "moe_layer_end_index": 5}
    model = model_of("ernie4_5_moe", **ernie, num_experts=None, num_experts_per_tok=None)
    assert [layer for layer in range(8) if model.kind_of(layer) is LayerKind.MOE] == [2, 3, 4, 5]
    kinds = {"mlp_layer_types": ["dense", "sparse"] * 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
             "qk_rope_head_dim": 8}  # fmt: skip
    lite = model_of("glm4_moe_lite", **kinds)
    assert [layer for layer in range(8) if lite.kind_of(layer) is LayerKind.MOE] == [1, 3, 5, 7]


def test_shared_experts_by_their_columns() -> None:
    moe = model_of("qwen2_moe", shared_expert_intermediate_size=96).moe
    assert moe is not None
    assert (moe.shared, moe.shared_gate) == (3, True)
    with pytest.raises(DiagnosticError, match="100 columns beside experts of 32"):
        model_of("qwen2_moe", shared_expert_intermediate_size=100)
    hunyuan = model_of("hunyuan_v1_moe", moe_topk=[2] * 8, num_experts_per_tok=None, moe_intermediate_size=None).moe
    assert hunyuan is not None
    assert (hunyuan.top, hunyuan.width, hunyuan.shared) == (2, 96, 1)
    with pytest.raises(DiagnosticError, match="differs between layers"):
        model_of("hunyuan_v1_moe", moe_topk=[2] * 7 + [1], num_experts_per_tok=None, moe_intermediate_size=None)


FALCON = {"num_kv_heads": 2, "bias": False, "num_key_value_heads": None}


@pytest.mark.parametrize(
    ("values", "kv_heads", "norms", "unnormed", "beside"),
    [
        ({"multi_query": True, "parallel_attn": True}, 1, 1, 1, True),
        ({"multi_query": False, "parallel_attn": False}, 2, 2, 0, False),
        ({"multi_query": False, "parallel_attn": False, "num_ln_in_parallel_attn": 1}, 2, 2, 0, False),
        ({"multi_query": True, "new_decoder_architecture": True}, 2, 2, 0, True),
        ({"multi_query": True, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 2, 1, 1, True),
    ],
)
def test_arrangements_of_falcon(values: dict[str, Any], kv_heads: int, norms: int, unnormed: int, beside: bool) -> None:
    model = model_of("falcon", **FALCON, **values)
    assert (model.attention.kv_heads, model.norms, model.unnormed, model.beside) == (kv_heads, norms, unnormed, beside)


@pytest.mark.parametrize(("model_type", "key"), [("falcon", "parallel_attn"), ("gpt_neox", "use_parallel_residual")])
def test_an_arrangement_that_is_no_truth_value_is_refused(model_type: str, key: str) -> None:
    with pytest.raises(DiagnosticError, match=f"`{key}` is 'no'"):
        model_of(model_type, **FALCON, **{key: "no"})


@pytest.mark.parametrize("model_type", NOT_MODELLED)
def test_a_mechanism_that_is_not_modelled_is_named(model_type: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_config(Source("config.json", text_of(model_type, text_config={"model_type": "llama"})))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "S704"
    assert NOT_MODELLED[model_type] in diagnostic.message
    assert ("text_config" in diagnostic.help) == (NOT_MODELLED[model_type] == "an encoder of pictures")
