"""A model as TOML (``schedc.model/1``): read and written, to the same value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.model.check import contradictory_sizes
from schedc.planner.reading.keys import Keys
from schedc.planner.reading.texts import parse_table
from schedc.source import Source

SCHEMA = "schedc.model/1"
MOST_LAYERS = 10_000
_FLAGS = ("beside", "norm_bias", "mlp_bias", "head_bias")
_DELETE = r"\u007f"
"""The one character that JSON takes in a text and TOML does not."""


def parse_model(source: Source) -> ModelSizes:
    """The model of a TOML text.

    Raises `DiagnosticError` for a text that is none (S701), sizes that are none (S702), and sizes that contradict each
    other (S703).
    """
    keys = Keys(parse_table(source, "S701", SCHEMA), source, "S702")
    heads = keys.integer("heads")
    hidden = keys.integer("hidden")
    sizes = _attention(keys, heads, hidden)
    model = ModelSizes(
        keys.text("name", default=Path(source.name).stem),
        keys.integer("layers", most=MOST_LAYERS),
        hidden,
        keys.integer("vocab"),
        sizes,
        ffn=keys.integer("ffn", default=0, least=0),
        gated=keys.flag("gated", default=True),
        moe=_moe(keys),
        mtp=keys.integer("mtp", default=0, least=0, most=MOST_LAYERS),
        tied=keys.flag("tied"),
        seq=keys.integer("seq", default=0, least=0),
        norms=keys.integer("norms", default=2, least=0, most=16),
        unnormed=keys.integer("unnormed", default=0, least=0, most=2),
        positions=keys.integer("positions", default=0, least=0),
        norm_weights=keys.flag("norm_weights", default=True),
        **{name: keys.flag(name) for name in _FLAGS},
        source=source,
    )
    keys.text("source")
    keys.inner("published")
    keys.refuse_rest()
    check_model(model, keys, {})
    return model


def check_model(model: ModelSizes, keys: Keys, written: dict[str, tuple[str, ...]]) -> None:
    """Raises `DiagnosticError` for what `keys` found, else for sizes that contradict each other (S703).

    written: the keys of the file for a size, where these have other names.
    """
    keys.stop()
    for size, message, help in contradictory_sizes(model):
        keys.say(keys.key_of(*written.get(size, (size,))), message, help, "S703")
    keys.stop()


def _attention(keys: Keys, heads: int, hidden: int) -> AttentionSizes:
    inner = keys.inner("attention") or Keys({}, keys.source, keys.code, "attention", keys.findings)
    kind = AttentionKind(inner.text("kind", default="gqa", among=tuple(AttentionKind)))
    mla = kind is AttentionKind.MLA
    head = 1 if mla else keys.integer("head_dim", default=max(hidden // heads, 1))
    if not mla and not keys.has("head_dim") and hidden % heads:
        keys.say("heads", f"{heads} heads of {hidden} columns", "say the columns of a head: head_dim = 128")
    sizes = AttentionSizes(
        heads,
        heads if mla else keys.integer("kv_heads", default=heads),
        inner.integer("qk_nope") if mla else head,
        inner.integer("v") if mla else head,
        kind,
        q_lora=inner.integer("q_lora", default=0, least=0) if mla else 0,
        kv_lora=inner.integer("kv_lora") if mla else 0,
        rope_dim=inner.integer("qk_rope") if mla else 0,
        qkv_bias=inner.flag("qkv_bias"),
        out_bias=inner.flag("out_bias"),
        **{name: inner.flag(name) for name in ("head_norms", "wide_norms", "sinks")},
        window=inner.integer("window", default=0, least=0),
        windowed=inner.integers("windowed", most=MOST_LAYERS),
        chunked=inner.flag("chunked"),
        head_norm_weights=inner.flag("head_norm_weights", default=True),
    )
    inner.refuse_rest()
    return sizes


def _moe(keys: Keys) -> MoeSizes | None:
    inner = keys.inner("moe")
    if inner is None:
        return None
    groups = inner.integer("groups", default=1)
    sizes = MoeSizes(
        inner.integer("experts"),
        inner.integer("top"),
        inner.integer("width"),
        groups=groups,
        limit=inner.integer("limit", default=groups),
        shared=inner.integer("shared", default=0, least=0),
        first_dense=inner.integer("first_dense", default=0, least=0),
        every=inner.integer("every", default=1),
        dense=inner.integers("dense", most=MOST_LAYERS),
        **{name: inner.flag(name) for name in ("bias", "router_bias", "shared_bias", "shared_gate")},
    )
    inner.refuse_rest()
    return sizes


def write_model(model: ModelSizes) -> str:
    """The model as TOML, without what is a default there. `parse_model` reads the same value."""
    return "\n".join([f'schema = "{SCHEMA}"', *_lines(model), ""])


def _lines(model: ModelSizes) -> Iterator[str]:
    sizes, moe = model.attention, model.moe
    mla = sizes.kind is AttentionKind.MLA
    heads = {"heads": sizes.heads} if mla else {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.qk_dim
    }  # fmt: skip
    top: dict[str, Any] = {"name": model.name, "layers": model.layers, "hidden": model.hidden, "vocab": model.vocab}
    top |= heads | {"ffn": model.ffn, "gated": model.gated, "mtp": model.mtp, "tied": model.tied, "seq": model.seq}
    top |= {each: getattr(model, each) for each in ("norms", "unnormed", "positions", "norm_weights", *_FLAGS)}
    yield from _settings(top, {"gated": True, "norms": 2, "norm_weights": True})
    narrow = {"kind": "mla", "q_lora": sizes.q_lora, "kv_lora": sizes.kv_lora, "qk_nope": sizes.qk_dim,
              "qk_rope": sizes.rope_dim, "v": sizes.v_dim} if mla else {}  # fmt: skip
    extras = ("qkv_bias", "out_bias", "head_norms", "wide_norms", "head_norm_weights", "sinks", "window", "windowed")
    said = {each: getattr(sizes, each) for each in (*extras, "chunked")}
    if attention := [*_settings(narrow | said, {"head_norm_weights": True})]:
        yield from ("", "[attention]", *attention)
    if moe is not None:
        values = {each.name: getattr(moe, each.name) for each in fields(MoeSizes)}
        yield from ("", "[moe]", *_settings(values, {"groups": 1, "limit": moe.groups, "every": 1}))


def _settings(values: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value != defaults.get(key, type(value)()):
            text = json.dumps(value, ensure_ascii=False)
            yield f"{key} = {text.replace(chr(127), _DELETE)}"
