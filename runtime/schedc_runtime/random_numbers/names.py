"""The name of the module that draws: the innermost module that is called, found on Python's stack when it draws."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function, has_torch_function

OUTSIDE = "outside of the model"
"""The name where no module is called: the loss function."""

Names = Mapping[int, str]
"""The name of each module, by its id."""


def names_of(module: nn.Module, aliases: Mapping[str, str] | None = None) -> dict[int, str]:
    """The names of all modules inside ``module``, by id. aliases: as `aliases_of` the whole model."""
    names: dict[int, str] = {}
    for path, part in module.named_modules():
        name = _plain(path)
        names[id(part)] = (aliases or {}).get(name, name)
    return names


def aliases_of(model: nn.Module) -> dict[str, str]:
    """By name of a module that has several: the first of these names in the order of the alphabet.

    A stage may hold such a module under any of its names.
    """
    paths: dict[int, list[str]] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(part), []).append(_plain(path))
    several = (sorted(set(names)) for names in paths.values())
    return {name: names[0] for names in several if len(names) > 1 for name in names}


def _plain(path: str) -> str:
    """The path without the wrapper of torch.compile."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


class NamedCall:
    """A function that is called in the code of the module ``name``, once that code has become code of a stage."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "drawn")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(isinstance(arg, fx.Proxy) for arg in (*args, *options.values())) and has_torch_function(args):
            return handle_torch_function(self, args, *args, **options)  # a stage that is traced: it stays one node
        return self.function(*args, **options)


def name_calls(graph: fx.Graph) -> None:
    """Keep the module's name with each call of a function that may draw. The graph's code will run in a stage."""
    for node in graph.nodes:
        if node.op == "call_method":
            function = getattr(Tensor, str(node.target), None)
        else:
            function = node.target if node.op == "call_function" else None
        if function is None or isinstance(function, NamedCall) or not may_draw(function):
            continue
        stack = list(node.meta.get("nn_module_stack", {}).values())
        node.op, node.target = "call_function", NamedCall(_plain(stack[-1][0]) if stack else "", function)


def may_draw(function: Any) -> bool:
    """Whether a function of torch may draw random numbers."""
    name = getattr(function, "__name__", "").strip("_")
    return "dropout" in name or name in _random_names()


@cache
def _random_names() -> frozenset[str]:
    """Names of torch's random operations, and of functions that call them."""
    operations = {operator._schema.name.removeprefix("aten::").strip("_") for operator in random_operators()}
    return frozenset(operations | _CALLERS)


_CALLERS = {"scaled_dot_product_attention", "multi_head_attention_forward", "gumbel_softmax", "rrelu"}


def random_operators() -> Iterator[Any]:
    """Torch's operations that draw from a generator, as torch marks them; backwards take what the forward drew.

    These are all registered ones. ``dir(torch.ops.aten)`` lists an operation once somebody has used it.
    """
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or "backward" in name or name in _DRAW_INSIDE:
            continue
        operator = getattr(getattr(torch.ops.aten, name), overload or "default", None)
        if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
            yield operator


_DRAW_INSIDE = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_fused_sdp_choice")
"""Attentions made of operations that draw themselves, and the choice among them. A detour takes time in each layer."""


def name_on_stack(frame: FrameType | None, names: Names) -> str:
    """The name of the innermost module, or `NamedCall`, among the callers of ``frame``."""
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            name = names.get(id(frame.f_locals["self"]))
            if name is not None:
                return name
        elif code is _NAMED:
            named: str = frame.f_locals["self"].name
            return named
        frame = frame.f_back
    return OUTSIDE


def modules_on_stack(frame: FrameType | None) -> Iterator[tuple[nn.Module, FrameType]]:
    """(module, frame of its call) of each module among the callers of ``frame``, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"], frame
        frame = frame.f_back


def runs_in(frame: FrameType | None, files: Iterable[str]) -> bool:
    """Whether one of the callers of ``frame`` is code of one of ``files``."""
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


_CALL = nn.Module.__call__.__code__
_NAMED = NamedCall.__call__.__code__
caller = sys._getframe
