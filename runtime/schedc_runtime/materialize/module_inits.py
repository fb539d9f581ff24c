"""Initialises a model that was made under plain ``torch.device("meta")``: its modules' own functions are recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from schedc_runtime.materialize.record import recording
from schedc_runtime.materialize.tape import Tape

_OWN = ("reset_parameters", "_reset_parameters", "init_weights", "initialize_weights")
"""Methods by which modules initialise themselves, of which the first that a module has is called."""


def record_inits(model: nn.Module, tape: Tape) -> dict[str, str]:
    """Record the initialisation of every module of ``model``, children first, and return what failed by module name.

    A Hugging Face model initialises all its modules itself.
    """
    errors: dict[str, str] = {}
    with recording(tape):
        for name, function in _functions(model, ""):
            try:
                function()
            except Exception as error:  # the names that it was to fill are refused, with this reason
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _functions(module: Any, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    if callable(getattr(module, "_init_weights", None)) and callable(getattr(module, "initialize_weights", None)):
        yield name, module.initialize_weights
        return
    for child_name, child in module.named_children():
        yield from _functions(child, f"{name}.{child_name}" if name else child_name)
    own = (getattr(module, method, None) for method in _OWN)
    function = next((method for method in own if callable(method) and not _needs_arguments(method)), None)
    if function is not None:
        yield name, function


def _needs_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
