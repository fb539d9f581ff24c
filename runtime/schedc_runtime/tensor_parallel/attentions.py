"""Puts a function of the pipeline in the place of those that attentions of Transformers take by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from schedc_runtime.errors import RuntimeFault

_PLAIN = ("sdpa", "eager")
_LAYERS = ("full_attention", "sliding_attention")


class PlainAttention(NamedTuple):
    """The attention function of a layer. boolean: whether it takes masks of truth values."""

    path: str
    call: Callable[..., Any]
    boolean: bool


def replace_attentions(
    model: nn.Module, paths: Sequence[str], name: str, function: Callable[..., Any], asked: str, remedy: str
) -> list[PlainAttention]:
    """Let the attentions at ``paths`` call ``function``, registered as ``name``. Returns what they called.

    asked, remedy: parts of errors. Raises `RuntimeFault` for a model whose layers take no function by name, have masks
    of another kind, or another kind of function.
    """
    config: Any = getattr(model, "config", None)
    own = all(getattr(model.get_submodule(path), "config", None) is config for path in paths)
    if not paths or not own or len(paths) != getattr(config, "num_hidden_layers", len(paths)):
        raise RuntimeFault(
            f"{asked}, and not every layer of {type(model).__name__} has a causal attention that takes its function by"
            " name from the model's config",
            remedy,
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
    given = config._attn_implementation
    if others or given not in _PLAIN:
        kind = others[0] if others else given
        raise RuntimeFault(
            f"{asked}, and {type(model).__name__} has `{kind}`, whose mask places do not give",
            'take one with full or sliding attention, and attn_implementation="sdpa" or "eager"',
        )
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    functions.register(name, function)
    config._attn_implementation = name
    return [
        PlainAttention(path, _plain(model.get_submodule(path), given, functions), given == "sdpa") for path in paths
    ]


def _plain(module: nn.Module, given: str, functions: Any) -> Callable[..., Any]:
    plain: Callable[..., Any] = (
        functions["sdpa"] if given == "sdpa" else sys.modules[type(module).__module__].eager_attention_forward
    )
    return plain


def takes_function(module: nn.Module) -> bool:
    """Whether a module is a causal attention of Transformers that takes its function by name."""
    named = hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
    return named and hasattr(module, "layer_idx") and bool(getattr(module, "is_causal", False))
