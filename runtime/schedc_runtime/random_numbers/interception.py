"""Calls a session before each draw of this thread, whoever draws: a module, a function, a method or custom code.

Dropout is met where `functional.dropout` calls into torch, which costs least. Every other operation that torch marks as
random is met by a dispatch key, which only a session switches on. Other operations never come here. In a step neither
do operations that are switched off, where that is known before: a detour through Python takes 10 to 30 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import _higher_order_ops

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.random_numbers.names import caller, random_operators, runs_in
from schedc_runtime.random_numbers.session import Session

Operator = Callable[..., Any]


class Listener(Protocol):
    """What listens to draws. passes: called for a random operation that is switched off; None: nobody asks."""

    @property
    def passes(self) -> Callable[[], None] | None: ...

    def draw(self, device: torch.device, frame: Any) -> None: ...


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
    _include(_PASSES_KEY, listener.passes is not None)


def end_listening() -> None:
    """Tell nobody any more."""
    global _listener
    _include(_KEY, False)
    _include(_PASSES_KEY, False)
    for name in _DROPOUTS:
        delattr(torch._VF, name)
    _listener = None


def _dropout(function: Operator, input: Tensor, p: float, train: bool) -> Tensor:
    """A dropout that `functional` calls, in place of torch's ``function``. Switched off, it costs little."""
    draws = train and p != 0
    if not draws and _listener is not None and _listener.passes is not None:
        _listener.passes()
    if not _included(_KEY) or (draws and type(input) not in _PLAIN and _compiling()):
        return function(input, p, train)  # type: ignore[no-any-return]
    if draws:
        assert _listener is not None
        _listener.draw(input.device, caller(1))
    _include(_KEY, False)
    try:
        return function(input, p, train)  # type: ignore[no-any-return]
    finally:
        _include(_KEY, True)


class Switch(NamedTuple):
    """An argument that decides whether an operation draws. off: its value where nothing is drawn."""

    position: int
    name: str
    default: Any
    off: Any


def _operation(call: Operator, key: Any, switches: Sequence[Switch], *args: Any, **options: Any) -> Any:
    """Any other random operation. call: runs it. key: of the dispatcher, for this kernel."""
    listener = _listener
    if listener is not None:
        draws, passes = _draws(switches, args, options), listener.passes
        if draws:
            if not _compiling():
                listener.draw(_device(args, options), caller(1))
        elif passes is not None and draws is False and not _compiling():
            passes()
    _include(key, False)
    try:
        return call(*args, **options)
    finally:
        _include(key, True)


def _draws(switches: Sequence[Switch], args: Sequence[Any], options: Mapping[str, Any]) -> bool | None:
    """Whether an operation draws from a default generator. None: the caller gave a generator."""
    given, draws = len(args), True
    for position, name, default, off in switches:
        value = args[position] if position < given else options.get(name, default)
        if name == "generator":
            if value is not None:
                return None
        elif value == off:
            draws = False
    return draws


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
_KEYS = {
    name: torch._C._dispatch_key_parse(name) for name in ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")
}
"""Keys above autograd and autocast that torch has for extensions like this one. No operation has a kernel for them."""
_KEY, _PASSES_KEY = _KEYS.values()
"""The second one is for operations that never draw, which no step meets."""
_NEVER_DRAW = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
_include = torch._C._dispatch_tls_set_dispatch_key_included
_included = torch._C._dispatch_tls_is_dispatch_key_included


@cache
def _pass_by(_count: int) -> None:
    """Let operators of higher order, such as flex attention, pass by the key, as others do by a fallback."""
    for operator in _higher_order_ops.values():
        operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(_KEY).remove(_PASSES_KEY)


@cache
def _register() -> list[Any]:
    """The kernels of the keys, made before the first session. Without a session nothing reaches them."""
    libraries = []
    for name, key in _KEYS.items():
        others, random = (torch.library.Library(space, "IMPL", name) for space in ("_", "aten"))  # type: ignore[no-untyped-call]
        others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
        for operator in random_operators():
            if (operator._schema.name in _NEVER_DRAW) == (key is _PASSES_KEY):
                random.impl(operator, partial(_operation, operator._op, key, _switches(operator)), name)  # type: ignore[no-untyped-call]
        libraries += [others, random]
    return libraries


def _switches(operator: Any) -> list[Switch]:
    """The arguments of an operation that decide whether it draws."""
    off = dict.fromkeys(_TRAIN, False) | dict.fromkeys(_RATE, 0) | {"generator": None}
    return [
        Switch(position, argument.name, argument.default_value, off[argument.name])
        for position, argument in enumerate(operator._schema.arguments)
        if argument.name in off and (argument.name != "p" or "dropout" in str(operator))
    ]
