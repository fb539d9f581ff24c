"""The families of models whose ``config.json`` is understood: mechanisms that each has beside the sizes of all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Arrangement(NamedTuple):
    """Where the norms of a layer stand. Fields are those of `ModelSizes`."""

    norms: int = 2
    unnormed: int = 0
    beside: bool = False


IN_FRONT = Arrangement()
SANDWICH = Arrangement(norms=4)
BEHIND = Arrangement(unnormed=2)
ONE_BESIDE = Arrangement(norms=1, unnormed=1, beside=True)
TWO_BESIDE = Arrangement(beside=True)


@dataclass(frozen=True)
class Family:
    """The mechanisms that the code of a ``model_type`` adds to its configuration.

    A text in place of a truth value is the key that says it.

    Attention: mla: from narrow vectors. head_norms, wide_norms: norms of queries and keys, per head or over all heads.
    all_keys: as many heads of keys as of queries, unless a file says them. multi_query: a key for one head of keys.
    windows: the rule that names the layers with a window; `layer_types` goes before all rules but the first. "all":
    each layer. "alternate": all but each n-th, with a ``pattern`` of n. "late": from `max_window_layers` on. "turned":
    layers with rotary positions. "listed": none. "if asked": only with `use_sliding_window`. window: the key of their
    tokens.

    MLP: gated: two products in front of the activation. ffn: the key of its columns, by default those of `SIZES`.
    wide: four times the columns of a token unless a file says them. learned: positions are learned.

    Norms: arrangement: where they stand. arranged: (values by key, arrangement), the first row that a file agrees with.

    Experts: expert_width: the key of the columns of an expert; empty for a family without experts. all_moe: no layer
    is dense. every: the key of the distance of MoE layers, and whether layer i has experts where i is a multiple of it,
    else i + 1. shared: shared experts, their number by a key or as given. shared_width: the key of the columns of all
    shared experts. sparse: the key of the layers with experts, by number or by kind. last: the key of the last one.
    """

    mla: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    head_norms: bool | str = False
    wide_norms: bool | str = False
    head_norm_weights: bool = True
    sinks: bool = False
    all_keys: bool = False
    multi_query: str = ""
    windows: str = ""
    pattern: int = 2
    window: str = "sliding_window"
    gated: bool = True
    ffn: str = ""
    wide: bool = False
    mlp_bias: bool | str = False
    learned: bool = False
    arrangement: Arrangement = IN_FRONT
    arranged: tuple[tuple[dict[str, int], Arrangement], ...] = ()
    norm_weights: bool = True
    norm_bias: bool = False
    head_bias: bool | str = False
    tied: bool = False
    expert_width: str = ""
    expert_bias: bool = False
    router_bias: bool = False
    shared: bool | int = False
    shared_width: str = ""
    shared_gate: bool = False
    all_moe: bool = False
    every: tuple[str, bool] | None = None
    sparse: str = ""
    last: str = ""
    mtp: bool = False


_BIAS, _EXPERT, _ALL_EXPERTS = "attention_bias", "moe_intermediate_size", "intermediate_size"
_LLAMA = Family(qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias="mlp_bias", all_keys=True)
_MISTRAL = Family(all_keys=True, windows="all")
_GEMMA = Family(qkv_bias=_BIAS, out_bias=_BIAS, tied=True, all_keys=True)
_GPT = Family(qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, all_keys=True, learned=True, norm_bias=True,
              gated=False, wide=True)  # fmt: skip
_NEOX = Family(qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=True, all_keys=True, norm_bias=True, gated=False,
               arranged=(({"use_parallel_residual": False}, IN_FRONT),), arrangement=TWO_BESIDE)  # fmt: skip
_COHERE = Family(qkv_bias=_BIAS, out_bias=_BIAS, tied=True, all_keys=True, arrangement=ONE_BESIDE)
_OLMO2 = Family(qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, wide_norms=True, arrangement=BEHIND)
_LATENT = Family(
    mla=True, qkv_bias=_BIAS, out_bias=_BIAS, expert_width=_EXPERT, shared=True, all_keys=True, mtp=True,
    every=("moe_layer_freq", True),
)  # fmt: skip
_ROUTED = Family(qkv_bias=_BIAS, head_norms="use_qk_norm", expert_width=_EXPERT, shared=True, mtp=True)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "arcee": replace(_LLAMA, gated=False),
    "helium": replace(_LLAMA, out_bias=False),
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, windows="listed", tied=True),
    "seed_oss": replace(_LLAMA, out_bias="attention_out_bias"),
    "ernie4_5": replace(_LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True),
    "hunyuan_v1_dense": replace(_LLAMA, mlp_bias=False, head_norms=True),
    "nemotron": replace(_LLAMA, gated=False, norm_bias=True),
    "mistral": _MISTRAL,
    "ministral3": _MISTRAL,
    "phi3": _MISTRAL,
    "qwen2": Family(qkv_bias=True, all_keys=True, windows="late if asked"),
    "qwen3": Family(qkv_bias=_BIAS, out_bias=_BIAS, head_norms=True, windows="late if asked"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, arrangement=SANDWICH, windows="alternate"),
    "gemma3_text": replace(_GEMMA, arrangement=SANDWICH, head_norms=True, windows="alternate", pattern=6),
    "glm": Family(qkv_bias=_BIAS),
    "glm4": Family(qkv_bias=_BIAS, arrangement=SANDWICH),
    "starcoder2": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", all_keys=True, windows="all", gated=False,
        norm_bias=True, tied=True,
    ),
    "stablelm": Family(
        qkv_bias="use_qkv_bias", all_keys=True, wide_norms="qk_layernorm", norm_bias=True,
        arranged=(({"use_parallel_residual": True}, ONE_BESIDE),),
    ),
    "olmo": Family(qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, norm_weights=False),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows="alternate", pattern=4),
    "exaone4": Family(all_keys=True, head_norms=True, arrangement=BEHIND, windows="alternate", pattern=4),
    "cohere": replace(_COHERE, wide_norms="use_qk_norm"),
    "cohere2": replace(_COHERE, windows="alternate", pattern=4),
    "gpt_neox": _NEOX,
    "falcon": Family(
        qkv_bias="bias", out_bias="bias", mlp_bias="bias", all_keys=True, multi_query="multi_query", wide=True,
        gated=False, norm_bias=True, tied=True,
        arranged=(
            ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, ONE_BESIDE),
            ({"new_decoder_architecture": True}, TWO_BESIDE),
            ({"parallel_attn": False}, IN_FRONT),
        ),
        arrangement=ONE_BESIDE,
    ),
    "phi": Family(
        qkv_bias=True, out_bias=True, mlp_bias=True, all_keys=True, gated=False, norm_bias=True, head_bias=True,
        arrangement=ONE_BESIDE,
    ),
    "gptj": Family(
        mlp_bias=True, all_keys=True, gated=False, wide=True, norm_bias=True, head_bias=True, arrangement=ONE_BESIDE
    ),
    "gpt2": _GPT,
    "gpt_bigcode": replace(_GPT, multi_query="multi_query"),
    "mixtral": Family(expert_width=_ALL_EXPERTS, all_moe=True, windows="all"),
    "phimoe": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, expert_width=_ALL_EXPERTS, all_moe=True, windows="all", norm_bias=True,
        head_bias="lm_head_bias",
    ),
    "granitemoe": Family(qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, expert_width=_ALL_EXPERTS, all_moe=True),
    "minimax_m2": Family(wide_norms=True, expert_width=_ALL_EXPERTS, all_moe=True),
    "olmoe": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, wide_norms=True, expert_width=_ALL_EXPERTS, all_moe=True
    ),
    "flex_olmo": replace(_OLMO2, expert_width=_ALL_EXPERTS, all_moe=True),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", all_keys=True, windows="listed", expert_width=_EXPERT, shared_gate=True,
        shared_width="shared_expert_intermediate_size", every=("decoder_sparse_step", False),
    ),
    "qwen3_moe": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, head_norms=True, windows="all if asked", expert_width=_EXPERT,
        every=("decoder_sparse_step", False),
    ),
    "llama4_text": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, ffn="intermediate_size_mlp", windows="turned", window="attention_chunk_size",
        expert_width=_ALL_EXPERTS, shared=1, head_norms="use_qk_norm",
        head_norm_weights=False, every=("interleave_moe_layer_step", False), sparse="moe_layers",
    ),
    "ernie4_5_moe": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", all_keys=True, tied=True,
        expert_width=_EXPERT, router_bias=True, shared=True, every=("moe_layer_interval", False),
        last="moe_layer_end_index",
    ),
    "hunyuan_v1_moe": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, head_norms=True, expert_width=_ALL_EXPERTS, all_moe=True,
        shared=1,
    ),
    "dots1": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, all_keys=True, head_norms=True, windows="late", expert_width=_EXPERT,
        shared=True,
    ),
    "deepseek_v2": replace(_LATENT, mlp_bias="mlp_bias"),
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm4_moe_lite": replace(_LATENT, sparse="mlp_layer_types"),
    "pangu_ultra_moe": replace(_LATENT, every=None, arranged=(({"sandwich_norm": True}, SANDWICH),)),
    "gpt_oss": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, sinks=True, expert_width=_ALL_EXPERTS, expert_bias=True, all_moe=True,
        windows="alternate",
    ),
    "glm4_moe": _ROUTED,
}  # fmt: skip
"""By ``model_type``."""

TEXT_ALONE = "an encoder of pictures"
"""The mechanism of models whose ``text_config`` may be a model by itself."""

_MECHANISMS: dict[str, str] = {
    "state spaces": "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 falcon_h1 nemotron_h granitemoehybrid",
    "linear attention": "qwen3_next qwen3_5_text qwen3_5_moe_text minimax kimi_linear olmo_hybrid bailing_hybrid",
    "a recurrence over tokens": "rwkv recurrent_gemma xlstm",
    "convolutions over tokens": "lfm2 lfm2_moe",
    "an encoder": "bert roberta electra t5 bart mbart whisper marian",
    TEXT_ALONE: "gemma3 gemma4 llama4 mllama qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 qwen3_5_moe mistral3 llava",
    "embeddings for each layer": "gemma3n_text gemma4_text",
    "attention to chosen tokens": "deepseek_v32 glm_moe_dsa",
    "heads of keys that differ between layers": "mimo_v2_flash",
    "two attentions in a layer": "longcat_flash",
    "activations with weights": "apertus",
    "a norm behind the embedding": "bloom",
}
NOT_MODELLED = {name: mechanism for mechanism, names in _MECHANISMS.items() for name in names.split()}
"""By ``model_type``, the mechanism that is not modelled."""


def _keys_of(family: Family) -> set[str]:
    """The keys that a family asks for beside sizes, and words for its windows."""
    texts = {value for value in vars(family).values() if isinstance(value, str) and value}
    return (
        texts
        | {key for values, _ in family.arranged for key in values}
        | ({family.every[0]} if family.every else set())
    )


FAMILY_KEYS = frozenset[str]().union(*map(_keys_of, FAMILIES.values()))
"""The keys of a ``config.json`` that some family has, and words for its windows."""
