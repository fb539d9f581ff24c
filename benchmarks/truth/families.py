"""Parameters and windows of families of models, against transformers.

Each family's `config.json` is read by schedc and made into a meta model by transformers. Then each flag of the
configuration is turned over, on few layers: equal again, or a refusal that names the flag. Other families are refused
by a mechanism without a model.
"""

from __future__ import annotations

import json
from typing import Any

from schedc.diagnostics import DiagnosticError
from schedc.model.counts import model_parameters
from schedc.planner.model.config import parse_config
from schedc.source import Source
from truth.cases import Case, Options, Verdict, verdict_of

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_FEW = {"num_hidden_layers": 6}

_AS_THEY_ARE = """llama arcee granite helium smollm3 seed_oss ernie4_5 mistral ministral3 phi3 qwen2 qwen3 gemma gemma2
gemma3_text glm glm4 starcoder2 stablelm olmo olmo2 olmo3 exaone4 cohere cohere2 gpt_neox falcon phi gptj gpt2
gpt_bigcode mixtral phimoe granitemoe minimax_m2 olmoe flex_olmo qwen2_moe qwen3_moe llama4_text ernie4_5_moe
deepseek_v3 glm4_moe_lite gpt_oss"""

FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _AS_THEY_ARE.split()},
    "nemotron": {"num_key_value_heads": 8, **_ROPE},
    "hunyuan_v1_dense": {"head_dim": 128, **_FEW, **_ROPE},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, **_FEW, **_ROPE},
    "dots1": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, **_FEW
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, **_FEW},
    "glm4_moe": {"head_dim": 128},
}  # fmt: skip
"""By ``model_type``, keys that the default configuration lacks."""

REFUSED = {
    "mamba2": "state spaces",
    "jamba": "state spaces",
    "qwen3_next": "linear attention",
    "mllama": "an encoder of pictures",
    "bert": "an encoder",
    "longcat_flash": "two attentions in a layer",
    "apertus": "activations with weights",
}
"""By ``model_type``, the mechanism in the refusal."""


_OF_CALLS = ("return_dict", "output_hidden_states", "output_attentions", "use_cache", "is_encoder_decoder",
             "add_cross_attention")  # fmt: skip
"""What a call returns, and what asks for another class of models."""
_WINDOWED = ("sliding_attention", "chunked_attention")


def all_families() -> list[Case]:
    """Every family of both tables, and every flag of the understood ones."""
    cases = [_counted(name) for name in FAMILIES]
    flags = [_counted(name, flag) for name in FAMILIES for flag in flags_of(name)]
    return [*cases, *flags, *(_refused(*each) for each in REFUSED.items())]


def flags_of(model_type: str) -> list[str]:
    """The truth values of a family's configuration that may change its model."""
    return sorted(
        key for key, value in _config(model_type).to_dict().items() if isinstance(value, bool) and key not in _OF_CALLS
    )


def _config(model_type: str, flag: str = "") -> Any:
    import transformers

    options = FAMILIES[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**options)
    if not flag:
        return config
    few = {"num_hidden_layers": 4} if hasattr(config, "num_hidden_layers") else {}
    return transformers.CONFIG_MAPPING[model_type](**{**options, **few, flag: not getattr(config, flag)})


def _counted(name: str, flag: str = "") -> Case:
    """A family with its defaults, or with one flag turned over."""
    import torch
    import transformers

    config, title = _config(name, flag), f"{name} {flag}".rstrip()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    values = {**config.to_dict(), "model_type": name}
    try:
        ours = parse_config(Source("config.json", json.dumps(values, indent=1, default=str)))
    except DiagnosticError as error:
        message = error.diagnostics[0].message
        return Case(title, bool(flag) and f"`{flag}`" in message, {"transformers": theirs, "refused": message})
    figures = {"transformers": theirs, "schedc": model_parameters(ours).total}
    agrees = figures["transformers"] == figures["schedc"]
    if kinds := values.get("layer_types"):
        windowed = [layer for layer, kind in enumerate(kinds[: ours.layers]) if kind in _WINDOWED]
        agrees &= windowed == [*ours.attention.windowed]
    return Case(title, agrees, figures)


def _refused(name: str, mechanism: str) -> Case:
    try:
        parse_config(Source("config.json", json.dumps({"model_type": name})))
    except DiagnosticError as error:
        message = error.diagnostics[0].message
        return Case(name, mechanism in message, {"refused": message})
    return Case(name, False, {"refused": None})


def families(_options: Options) -> Verdict:
    """The word `families`."""
    return verdict_of(all_families())
