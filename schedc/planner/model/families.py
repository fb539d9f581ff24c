"""The families of models whose ``config.json`` is understood: what each has beside the sizes that all have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the code of a ``model_type`` does beside what its configuration says.

    A text in place of a truth value is the key that says it. mla: attention from narrow vectors. expert_width: the key
    of the columns of an expert; empty for a family without experts. all_moe: no layer is dense. every: the key of the
    distance of MoE layers, and whether layer i has experts where i is a multiple of it, else i + 1. sandwich: norms
    behind both halves of a layer, too. tied: the default of `tie_word_embeddings`. all_keys: heads of keys are those of
    queries unless a file says them. windows: "all" layers look back `sliding_window` tokens, "alternate" ones from the
    first on unless `layer_types` says it, or none but those of "layer_types". learned: positions are learned, norms
    have biases, and MLPs no gate.
    """

    mla: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool | str = False
    sandwich: bool | str = False
    sinks: bool = False
    expert_width: str = ""
    expert_bias: bool = False
    shared: bool = False
    all_moe: bool = False
    every: tuple[str, bool] | None = None
    tied: bool = False
    all_keys: bool = False
    windows: str = ""
    mtp: bool = False
    learned: bool = False


_BIAS, _EXPERT = "attention_bias", "moe_intermediate_size"
_LATENT = Family(
    mla=True, qkv_bias=_BIAS, out_bias=_BIAS, expert_width=_EXPERT, shared=True, all_keys=True, mtp=True,
    every=("moe_layer_freq", True),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias="mlp_bias", all_keys=True),
    "qwen3": Family(qkv_bias=_BIAS, out_bias=_BIAS, head_norms=True, windows="layer_types"),
    "qwen3_moe": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, head_norms=True, expert_width=_EXPERT, every=("decoder_sparse_step", False)
    ),
    "mixtral": Family(expert_width="intermediate_size", all_moe=True, windows="all"),
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "pangu_ultra_moe": Family(
        mla=True, qkv_bias=_BIAS, out_bias=_BIAS, expert_width=_EXPERT, shared=True, all_keys=True, mtp=True,
        sandwich="sandwich_norm",
    ),
    "gpt_oss": Family(
        qkv_bias=_BIAS, out_bias=_BIAS, sinks=True, expert_width="intermediate_size", expert_bias=True, all_moe=True,
        windows="alternate",
    ),
    "glm4_moe": Family(qkv_bias=_BIAS, head_norms="use_qk_norm", expert_width=_EXPERT, shared=True, mtp=True),
    "gpt2": Family(qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, all_keys=True, learned=True),
}  # fmt: skip
"""By ``model_type``."""

_VALUES = [value for family in FAMILIES.values() for value in vars(family).values()]
FAMILY_KEYS = frozenset(value[0] if isinstance(value, tuple) else value for value in _VALUES if value) - {True}
"""The keys of a ``config.json`` that some family has, and words for its windows."""
