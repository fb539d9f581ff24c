"""Reads the ``config.json`` of a Hugging Face model as plain JSON: no code of the model runs, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from schedc.diagnostics import did_you_mean
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.model.config_keys import ACTIVATIONS, IRRELEVANT, ONLY, SIZES
from schedc.planner.model.families import FAMILIES, FAMILY_KEYS, Family
from schedc.planner.model.file import MOST_LAYERS, check_model
from schedc.planner.reading.keys import Keys
from schedc.planner.reading.texts import parse_json
from schedc.source import Source

_WINDOWS = {"sliding_attention": True, "full_attention": False}


def parse_config(source: Source) -> ModelSizes:
    """The model of a ``config.json``.

    Raises `DiagnosticError` for a text that is none (S701), sizes that are none (S702), and sizes that contradict each
    other (S703). It names models and keys that are not understood (S704).
    """
    keys = Keys(parse_json(source, "S701"), source, "S702")
    family = _family(keys)
    layers = keys.integer(*SIZES["layers"], most=MOST_LAYERS)
    hidden = keys.integer(*SIZES["hidden"])
    ffn = 0 if family.all_moe else _ffn(keys, family, hidden)
    model = ModelSizes(
        _name(keys, source),
        layers,
        hidden,
        keys.integer(*SIZES["vocab"]),
        _attention(keys, family, hidden, layers),
        ffn=ffn,
        gated=not family.learned,
        moe=_moe(keys, family, layers) if family.expert_width else None,
        mtp=keys.integer(*SIZES["mtp"], default=0, least=0, most=MOST_LAYERS) if family.mtp else 0,
        tied=keys.flag("tie_word_embeddings", default=family.tied),
        norms=4 if _says(keys, family.sandwich) else 2,
        positions=keys.integer("n_positions") if family.learned else 0,
        norm_bias=family.learned,
        mlp_bias=_says(keys, family.mlp_bias),
        source=source,
    )
    _refuse_mechanisms(keys)
    check_model(model, keys, SIZES)
    return model


def _family(keys: Keys) -> Family:
    """Raises `DiagnosticError` for a model that is not understood, with every key that no model here has."""
    name = keys.text("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    keys.findings.clear()
    known = ", ".join(FAMILIES)
    message = f"`{name}` is no model type that is understood" if name else "no `model_type`"
    keys.say("model_type", message, f"known: {known}; write any other model as a model file (TOML)", "S704")
    keys.taken.update(key for names in SIZES.values() for key in names)
    keys.taken.update(("tie_word_embeddings", "hidden_act", "head_dim", "n_positions", *FAMILY_KEYS))
    _refuse_mechanisms(keys)
    keys.stop()
    raise AssertionError


def _refuse_mechanisms(keys: Keys) -> None:
    """Findings for keys that change what a step computes in a way that is not counted."""
    keys.text("hidden_act", "activation_function", default="silu", among=ACTIVATIONS)
    if keys.table.get("use_sliding_window") is False:
        keys.taken.update(("sliding_window", "layer_types"))
    for key in keys.rest():
        value = keys.table[key]
        if key in IRRELEVANT or value is None or (key in ONLY and any(value is v or value == v for v in ONLY[key])):
            continue
        near = did_you_mean(key, sorted(keys.taken)) if key not in ONLY else ""
        help = near if near.startswith("did") else "take it out if it changes no product, or write a model file (TOML)"
        keys.say(key, f"`{key}` may change what a step computes, and is not understood", help, "S704")


def _name(keys: Keys, source: Source) -> str:
    path = Path(source.name)
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _says(keys: Keys, what: bool | str) -> bool:
    return keys.flag(what) if isinstance(what, str) and what else bool(what)


def _ffn(keys: Keys, family: Family, hidden: int) -> int:
    keys.taken.update(SIZES["ffn"])
    if family.expert_width and not keys.has(*SIZES["ffn"]):
        return 0
    return keys.integer(*SIZES["ffn"], default=4 * hidden if family.learned else None)


def _attention(keys: Keys, family: Family, hidden: int, layers: int) -> AttentionSizes:
    heads = keys.integer(*SIZES["heads"])
    kv_heads = keys.integer(*SIZES["kv_heads"], default=heads if family.all_keys else None)
    qkv_bias, out_bias = _says(keys, family.qkv_bias), _says(keys, family.out_bias)
    if family.mla:
        keys.taken.update(("head_dim", "qk_head_dim"))
        return AttentionSizes(
            heads,
            heads,
            keys.integer(*SIZES["qk_nope"]),
            keys.integer(*SIZES["v"]),
            AttentionKind.MLA,
            q_lora=keys.integer(*SIZES["q_lora"], default=0, least=0),
            kv_lora=keys.integer(*SIZES["kv_lora"]),
            rope_dim=keys.integer(*SIZES["qk_rope"]),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        )
    if not keys.has("head_dim") and hidden % heads:
        keys.say(
            keys.key_of(*SIZES["heads"]), f"{heads} heads of {hidden} columns, and no `head_dim`", "add `head_dim`"
        )
    head = keys.integer("head_dim", default=max(hidden // heads, 1))
    windowed = _windowed(keys, family, layers)
    window = keys.integer("sliding_window") if windowed else 0
    norms = _says(keys, family.head_norms)
    if family.head_norms is True and keys.table.get("use_qk_norm") is True:
        keys.taken.add("use_qk_norm")
    return AttentionSizes(
        heads,
        kv_heads,
        head,
        head,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norms=norms,
        sinks=family.sinks,
        window=window,
        windowed=windowed,
    )


def _windowed(keys: Keys, family: Family, layers: int) -> tuple[int, ...]:
    """The layers with a window."""
    if not family.windows or keys.table.get("use_sliding_window") is False:
        return ()
    if family.windows == "all":
        return tuple(range(layers)) if keys.has("sliding_window") else ()
    keys.taken.add("sliding_window")
    if not keys.has("layer_types"):
        alternate = family.windows == "alternate" and keys.has("sliding_window")
        return tuple(range(0, layers, 2)) if alternate else ()
    kinds = keys.table["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        keys.say("layer_types", f"`layer_types` is no list of {layers} kinds", 'write ["full_attention", ...]')
        return ()
    if other := next((kind for kind in kinds if kind not in _WINDOWS), None):
        keys.say("layer_types", f"layers of kind `{other}` are not understood", f"known: {', '.join(_WINDOWS)}", "S704")
    return tuple(layer for layer, kind in enumerate(kinds) if _WINDOWS.get(kind))


def _moe(keys: Keys, family: Family, layers: int) -> MoeSizes:
    groups = keys.integer(*SIZES["groups"], default=1)
    key, from_zero = family.every or ("", False)
    every = keys.integer(key, default=1) if key else 1
    dense = () if family.all_moe else keys.integers(*SIZES["dense"], most=MOST_LAYERS)
    if from_zero and every > 1:
        dense, every = (*dense, *(layer for layer in range(layers) if layer % every)), 1
    first = 0 if family.all_moe or key == "decoder_sparse_step" else keys.integer(
        *SIZES["first_dense"], default=0, least=0, most=MOST_LAYERS
    )  # fmt: skip
    return MoeSizes(
        keys.integer(*SIZES["experts"]),
        keys.integer(*SIZES["top"]),
        keys.integer(family.expert_width),
        groups=groups,
        limit=keys.integer(*SIZES["limit"], default=groups),
        shared=keys.integer(*SIZES["shared"], default=0, least=0) if family.shared else 0,
        first_dense=first,
        every=every,
        dense=dense,
        bias=family.expert_bias,
    )
