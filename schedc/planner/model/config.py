"""Reads the ``config.json`` of a Hugging Face model as plain JSON: no code of the model runs, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from schedc.diagnostics import did_you_mean
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.model.config_keys import ACTIVATIONS, IRRELEVANT, ONLY, SIZES
from schedc.planner.model.families import (
    FAMILIES,
    FAMILY_KEYS,
    NOT_MODELLED,
    TEXT_ALONE,
    Arrangement,
    Family,
)
from schedc.planner.model.file import MOST_LAYERS, check_model
from schedc.planner.reading.keys import Keys
from schedc.planner.reading.texts import parse_json
from schedc.source import Source

_WINDOWS = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_SPARSE = {"sparse": True, "dense": False}


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
    arrangement = _arrangement(keys, family)
    model = ModelSizes(
        _name(keys, source),
        layers,
        hidden,
        keys.integer(*SIZES["vocab"]),
        _attention(keys, family, hidden, layers),
        ffn=ffn,
        gated=family.gated,
        moe=_moe(keys, family, layers) if family.expert_width else None,
        mtp=keys.integer(*SIZES["mtp"], default=0, least=0, most=MOST_LAYERS) if family.mtp else 0,
        tied=keys.flag("tie_word_embeddings", default=family.tied),
        **arrangement._asdict(),
        positions=keys.integer("n_positions") if family.learned else 0,
        norm_weights=family.norm_weights,
        norm_bias=family.norm_bias,
        mlp_bias=_says(keys, family.mlp_bias),
        head_bias=_says(keys, family.head_bias),
        source=source,
    )
    keys.taken.add("n_positions")
    _refuse_mechanisms(keys)
    check_model(model, keys, SIZES)
    return model


def _family(keys: Keys) -> Family:
    """Raises `DiagnosticError` for a model that is not understood, with every key that no model here has."""
    name = keys.text("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    keys.findings.clear()
    if mechanism := NOT_MODELLED.get(name):
        nested = mechanism == TEXT_ALONE and "text_config" in keys.table
        help = "write its `text_config` to a file of its own" if nested else "no plan is made for such models"
        keys.say("model_type", f"`{name}` is not modelled: it has {mechanism}", help, "S704")
        keys.stop()
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
    for key in ("hidden_act", "activation_function", "hidden_activation", "activation"):
        keys.text(key, default="silu", among=ACTIVATIONS)
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


def _arrangement(keys: Keys, family: Family) -> Arrangement:
    said: dict[str, int | None] = {}
    for key, value in ((key, value) for values, _ in family.arranged for key, value in values.items()):
        read = keys.flag if isinstance(value, bool) else keys.integer
        said[key] = read(key) if keys.has(key) else None
    agreed = (each for values, each in family.arranged if all(said[key] == value for key, value in values.items()))
    return next(agreed, family.arrangement)


def _ffn(keys: Keys, family: Family, hidden: int) -> int:
    names = (family.ffn,) if family.ffn else SIZES["ffn"]
    keys.taken.update(names)
    if family.expert_width and not keys.has(*names):
        return 0
    return keys.integer(*names, default=4 * hidden if family.wide else None)


def _attention(keys: Keys, family: Family, hidden: int, layers: int) -> AttentionSizes:
    heads = keys.integer(*SIZES["heads"])
    kv_heads = keys.integer(*SIZES["kv_heads"], default=heads if family.all_keys else None)
    if _says(keys, family.multi_query) and keys.table.get("new_decoder_architecture") is not True:
        kv_heads = 1
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
    window = keys.integer(family.window) if windowed else 0
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
        wide_norms=_says(keys, family.wide_norms),
        head_norm_weights=family.head_norm_weights or not norms,
        sinks=family.sinks,
        window=window,
        windowed=windowed,
        chunked=bool(windowed) and family.window == "attention_chunk_size",
    )


def _windowed(keys: Keys, family: Family, layers: int) -> tuple[int, ...]:
    """The layers with a window."""
    rule, asked = family.windows.removesuffix(_IF_ASKED), family.windows.endswith(_IF_ASKED)
    if not rule or keys.table.get("use_sliding_window") is False:
        return ()
    if asked and not keys.flag("use_sliding_window"):
        keys.taken.add(family.window)
        return ()
    has_window = keys.has(family.window)
    keys.taken.update(_PATTERNS if rule == "alternate" else ())
    if keys.has("layer_types") and rule != "all":
        keys.taken.add("use_sliding_window")
        return _layers_of_kind(keys, "layer_types", layers, _WINDOWS)
    return tuple(layer for layer, back in enumerate(_RULES[rule](keys, family, layers)) if back) if has_window else ()


def _late(keys: Keys, _: Family, layers: int) -> list[bool]:
    first = keys.integer("max_window_layers", default=0, least=0)
    return [layer >= first for layer in range(layers)]


def _alternate(keys: Keys, family: Family, layers: int) -> list[bool]:
    """All but each n-th layer, or as a text of L and G says it, again and again."""
    key = keys.key_of(*_PATTERNS)
    said = keys.table.get(key)
    if isinstance(said, str) and said and set(said) <= {"L", "G"}:
        return [said[layer % len(said)] == "L" for layer in range(layers)]
    every = keys.integer(key, default=family.pattern)
    return [(layer + 1) % every > 0 for layer in range(layers)]


def _turned(keys: Keys, _: Family, layers: int) -> list[bool]:
    said = keys.integers("no_rope_layers", most=1)
    return [bool(turned) for turned in said[:layers]] if said else [(layer + 1) % 4 > 0 for layer in range(layers)]


def _listed(keys: Keys, _: Family, layers: int) -> list[bool]:
    if keys.table.get("use_sliding_window"):
        keys.say("use_sliding_window", "windows, and no list of the layers that have them", "add `layer_types`", "S704")
    return [False] * layers


_IF_ASKED = " if asked"
_RULES: dict[str, Callable[[Keys, Family, int], list[bool]]] = {
    "all": lambda keys, family, layers: [True] * layers,
    "late": _late,
    "alternate": _alternate,
    "turned": _turned,
    "listed": _listed,
}


def _layers_of_kind(keys: Keys, key: str, layers: int, kinds: Mapping[str, bool]) -> tuple[int, ...]:
    """The layers whose kind in a list is one that ``kinds`` says yes to."""
    said = keys.table[key]
    if not isinstance(said, list) or len(said) != layers or not all(isinstance(kind, str) for kind in said):
        keys.say(key, f"`{key}` is no list of {layers} kinds", f'write ["{[*kinds][-1]}", ...]')
        return ()
    if other := next((kind for kind in said if kind not in kinds), None):
        keys.say(key, f"layers of kind `{other}` are not understood", f"known: {', '.join(kinds)}", "S704")
    return tuple(layer for layer, kind in enumerate(said) if kinds.get(kind))


def _moe(keys: Keys, family: Family, layers: int) -> MoeSizes:
    groups = keys.integer(*SIZES["groups"], default=1)
    key, from_zero = family.every or ("", False)
    every = keys.integer(key, default=1) if key else 1
    dense = () if family.all_moe else keys.integers(*SIZES["dense"], most=MOST_LAYERS)
    if from_zero and every > 1:
        dense, every = (*dense, *(layer for layer in range(layers) if layer % every)), 1
    if family.sparse and keys.has(family.sparse):
        sparse = _sparse(keys, family.sparse, layers)
        dense, every = tuple(layer for layer in range(layers) if layer not in sparse), 1
    if family.last and (last := keys.integer(family.last, default=-1, least=-1)) >= 0:
        dense = (*dense, *range(last + 1, layers))
    width = keys.integer(family.expert_width)
    shared = _shared(keys, family, width)
    first = 0 if family.all_moe or key == "decoder_sparse_step" else keys.integer(
        *SIZES["first_dense"], default=0, least=0, most=MOST_LAYERS
    )  # fmt: skip
    return MoeSizes(
        keys.integer(*SIZES["experts"]),
        _top(keys),
        width,
        groups=groups,
        limit=keys.integer(*SIZES["limit"], default=groups),
        shared=shared,
        first_dense=first,
        every=every,
        dense=dense,
        bias=family.expert_bias,
        router_bias=family.router_bias,
        shared_bias=_says(keys, family.mlp_bias) and shared > 0,
        shared_gate=family.shared_gate and shared > 0,
    )


def _sparse(keys: Keys, key: str, layers: int) -> tuple[int, ...]:
    """The layers with experts, from a list of numbers or of kinds."""
    said = keys.table[key]
    if isinstance(said, list) and said and isinstance(said[0], str):
        return _layers_of_kind(keys, key, layers, _SPARSE)
    return keys.integers(key, most=MOST_LAYERS)


def _top(keys: Keys) -> int:
    """Experts of a token; a list has one number for all layers."""
    key = keys.key_of(*SIZES["top"])
    said = keys.table.get(key)
    if not isinstance(said, list):
        return keys.integer(*SIZES["top"])
    if len(set(map(str, said))) != 1:
        keys.say(key, f"`{key}` differs between layers", "plans know one number for all layers", "S704")
        return 1
    return Keys({key: said[0]}, keys.source, keys.code, findings=keys.findings).integer(key)


def _shared(keys: Keys, family: Family, width: int) -> int:
    """Shared experts, each as wide as a routed one."""
    if not family.shared_width:
        named = family.shared is True
        return keys.integer(*SIZES["shared"], default=0, least=0) if named else int(family.shared)
    columns = keys.integer(family.shared_width, default=0, least=0)
    if columns % width:
        message = f"shared experts of {columns} columns beside experts of {width}"
        keys.say(family.shared_width, message, "plans know shared experts as wide as routed ones", "S704")
    return columns // width
