"""Gives the calls of a graph one form: `a * b`, `torch.mul(a, b)` and `a.mul(b)` are the same call."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from schedc_runtime.random_numbers.names import NamedCall

_SAME = {"radd": "add", "rmul": "mul", "truediv": "div", "view": "reshape"}
"""Other names of a function."""

_TAKES: dict[str, tuple[tuple[str, Any], ...]] = {
    "add": (("input", None), ("other", None), ("alpha", 1)),
    "mul": (("input", None), ("other", None)),
    "div": (("input", None), ("other", None), ("rounding_mode", None)),
    **dict.fromkeys(("neg", "tanh", "erf", "rsqrt"), (("input", None),)),
    "mean": (("input", None), ("dim", None), ("keepdim", False), ("dtype", None)),
    "to": (("input", None), ("dtype", None)),
    "pow": (("input", None), ("exponent", None)),
    "cat": (("tensors", None), ("dim", 0)),
    "getitem": (("input", None), ("index", None)),
    "silu": (("input", None), ("inplace", False)),
    "gelu": (("input", None), ("approximate", "none")),
    "dropout": (("input", None), ("p", 0.5), ("training", True), ("inplace", False)),
    "scaled_dot_product_attention": (
        ("query", None), ("key", None), ("value", None), ("attn_mask", None), ("dropout_p", 0.0),
        ("is_causal", False), ("scale", None), ("enable_gqa", False),
    ),
}  # fmt: skip
"""The arguments that a function takes, with their defaults."""
_SHAPED = ("expand", "reshape")
"""Functions with sizes as arguments, in a tuple or singly."""

COMMUTES = ("add", "mul")
"""Functions whose first two arguments may change places."""


class UniformCall(NamedTuple):
    """A call in its one form: name of the function, and the values of all of its arguments."""

    name: str
    args: tuple[Any, ...]


def call_of(node: fx.Node) -> UniformCall | None:
    """The call of a node; None for calls of modules and of functions that no pattern has."""
    if node.op not in ("call_function", "call_method"):
        return None
    target = node.target.function if isinstance(node.target, NamedCall) else node.target
    # A function that writes to its argument has an underscore behind its name: it is another function.
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    name = _SAME.get(name, name)
    args, options = node.args, dict(node.kwargs)
    if name in _SHAPED:
        sizes = args[1] if len(args) == 2 and not isinstance(args[1], int) else tuple(args[1:])
        return None if options else UniformCall(name, (args[0], sizes))
    if name not in _TAKES or len(args) > len(_TAKES[name]):
        return None
    values = [*args, *(options.pop(key, default) for key, default in _TAKES[name][len(args) :])]
    return None if options else UniformCall(name, tuple(values))
