"""Sends the calls of modules to a recorder while a model is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction

from schedc_runtime.partition.recorder import ForwardRecorder, Original


@contextmanager
def module_calls_to(recorder: ForwardRecorder, model: nn.Module) -> Iterator[None]:
    """Sends the calls of all modules, and of functions with a backward of their own, to the recorder."""
    plain = nn.Module.__call__
    kinds = {nn.Module} | {
        next(kind for kind in type(module).__mro__ if "__call__" in vars(kind)) for module in model.modules()
    }
    before = {kind: vars(kind)["__call__"] for kind in kinds}
    running: list[nn.Module] = []

    def replaced(original: Original) -> Original:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if running and running[-1] is self:  # a class with a call of its own, which calls that of nn.Module
                return original(self, *args, **kwargs)
            running.append(self)
            with recorder.notes.switched(False):
                if (compiled := self._compiled_call_impl) is not None:
                    self._compiled_call_impl = None
                try:
                    return recorder.call(self, args, kwargs, original)
                finally:
                    if compiled is not None:
                        self._compiled_call_impl = compiled
                    running.pop()

        return call

    def custom(kind: Any, apply: Original, args: tuple[Any, ...]) -> Any:
        return recorder.custom(kind, apply, args)

    try:
        for kind, own in before.items():
            kind.__call__ = replaced(plain if kind is nn.Module else own)  # type: ignore[method-assign]
        with custom_functions_to(custom):
            yield
    finally:
        for kind, own in before.items():
            kind.__call__ = own  # type: ignore[method-assign]


@contextmanager
def custom_functions_to(take: Callable[[Any, Original, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Sends the calls of functions with a backward of their own to ``take(kind, apply, args)``.

    It replaces what `apply` of such a function calls: a model may keep `apply` itself, as ``f = MyFunction.apply``.
    """
    base: Any = _SingleLevelFunction
    before = vars(base).get("apply")
    plain = before or vars(torch._C._FunctionBase)["apply"]

    def custom(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return take(kind, partial(plain.__get__(None, kind), **kwargs), args)

    base.apply = classmethod(custom)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
