"""Calls a session before each draw of this thread, whoever draws: a module, a function, a method or custom code.

Dropout is met where `functional.dropout` calls into torch, which costs least. Every other operation that torch marks as
random is met by a dispatch key, which only a session switches on. Other operations never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import _higher_order_ops

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.random_numbers.names import caller, random_operators, runs_in
from schedc_runtime.random_numbers.session import Session

Operator = Callable[..., Any]


class Listener(Protocol):
    """What listens to draws."""

    def draw(self, device: torch.device, frame: Any) -> None: ...

    def passes(self) -> None: ...


_listener: Listener | None = None


def session() -> Session | None:
    """The session of this step; None if numbers are not by name."""
    return _listener if isinstance(_listener, Session) else None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells ``listener`` of each draw of this thread, and of the backward's threads."""
    listen(listener)
    try:
        yield
    finally:
        end_listening()


def listen(listener: Listener) -> None:
    """Begin to tell ``listener``, until `end_listening`."""
    global _listener
    if _listener is not None:
        raise RuntimeFault(
            "random numbers by name begin inside of others", "end `named_random` before a pipeline steps"
        )
    _register()
    _pass_by(len(_higher_order_ops))
    _listener = listener
    vars(torch._VF).update(_DROPOUTS)
    _include(_KEY, True)


def end_listening() -> None:
    """Tell nobody any more."""
    global _listener
    _include(_KEY, False)
    for name in _DROPOUTS:
        delattr(torch._VF, name)
    _listener = None


def _dropout(function: Operator, input: Tensor, p: float, train: bool) -> Tensor:
    """A dropout that `functional` calls, in place of torch's ``function``."""
    if not train or p == 0:
        if _listener is not None:
            _listener.passes()
    elif _included(_KEY) and (type(input) in _PLAIN or not _compiling()):
        assert _listener is not None
        _listener.draw(input.device, caller(1))
        _include(_KEY, False)
        try:
            return function(input, p, train)  # type: ignore[no-any-return]
        finally:
            _include(_KEY, True)
    return function(input, p, train)  # type: ignore[no-any-return]


def _operation(operator: Any, where: Mapping[str, tuple[int, Any]], *args: Any, **options: Any) -> Any:
    """Any other random operation. where: position and default of the arguments that tell whether it draws."""

    def argument(name: str, otherwise: Any) -> Any:
        if name not in where:
            return otherwise
        position, default = where[name]
        return args[position] if position < len(args) else options.get(name, default)

    if _listener is not None and argument("generator", None) is None and not _compiling():
        draws = all(argument(name, True) for name in _TRAIN) and all(argument(name, 1.0) != 0 for name in _RATE)
        if draws:
            _listener.draw(_device(args, options), caller(1))
        else:
            _listener.passes()
    _include(_KEY, False)
    try:
        return operator(*args, **options)
    finally:
        _include(_KEY, True)


def _compiling() -> bool:
    """Whether torch.compile runs this code to make its graphs. Compiled code draws when it runs."""
    return TracingContext.try_get() is not None or runs_in(caller(2), _COMPILER)


def _device(args: Sequence[Any], options: Mapping[str, Any]) -> torch.device:
    """The device on which an operation draws."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
            return arg[0].device
    given = options.get("out", options.get("device"))
    return given.device if isinstance(given, Tensor) else torch.device(given or "cpu")


_COMPILER = frozenset({str(Path(torch.__file__).parent / "_dynamo" / "convert_frame.py")})
_TRAIN, _RATE = ("train", "training"), ("dropout_p", "dropout", "p")
_PLAIN = (Tensor, nn.Parameter)
_DROPOUTS = {
    name + suffix: partial(_dropout, getattr(torch._C._VariableFunctions, name + suffix))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
}
_KEY_NAME = "TESTING_ONLY_GenericMode"
"""A key above autograd and autocast that torch has for extensions like this one. No operation has a kernel for it."""
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_include = torch._C._dispatch_tls_set_dispatch_key_included
_included = torch._C._dispatch_tls_is_dispatch_key_included


@cache
def _pass_by(_count: int) -> None:
    """Let operators of higher order, such as flex attention, pass by the key, as others do by a fallback."""
    for operator in _higher_order_ops.values():
        operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(_KEY)


@cache
def _register() -> list[Any]:
    """The kernels of the key, made before the first session. Without a session nothing reaches them."""
    others = torch.library.Library("_", "IMPL", _KEY_NAME)  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    random = torch.library.Library("aten", "IMPL", _KEY_NAME)  # type: ignore[no-untyped-call]
    for operator in random_operators():
        where = {
            argument.name: (position, argument.default_value)
            for position, argument in enumerate(operator._schema.arguments)
            if argument.name in ("generator", *_TRAIN, *_RATE) or (argument.name == "p" and "dropout" in str(operator))
        }
        random.impl(operator, partial(_operation, operator, where), _KEY_NAME)  # type: ignore[no-untyped-call]
    return [others, random]
